# SPDX-License-Identifier: Apache-2.0
"""Small layers as erofs file systems, made by Debian's mkfs.erofs."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

import attrs

UUID = "00000000-0000-0000-0000-000000000000"  # fixed, so that equal trees give equal images


@attrs.frozen
class Layer:
    """A layer's file system. `diff_id` is made up, because it can't be computed from the file system."""

    diff_id: str
    content: bytes = attrs.field(repr=False)

    @property
    def digest(self) -> str:
        return f"sha256:{hashlib.sha256(self.content).hexdigest()}"


def layer(files: Mapping[str, bytes]) -> Layer:
    """Make a layer of these files, by path. An empty file `.wh.NAME` becomes a whiteout of NAME.

    `.wh..wh..opq` makes its directory opaque.
    """
    with tempfile.TemporaryDirectory() as made:
        tree, image = Path(made, "tree"), Path(made, "image")
        tree.mkdir()
        for name, content in files.items():
            path = tree / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.name == ".wh..wh..opq":
                os.setxattr(path.parent, "trusted.overlay.opaque", b"y")
            elif path.name.startswith(".wh."):
                whiteout = path.with_name(path.name.removeprefix(".wh."))
                subprocess.run(["mknod", whiteout, "c", "0", "0"], check=True)
            else:
                path.write_bytes(content)
                path.chmod(0o755)
        command: list[str | Path] = [
            "mkfs.erofs",
            "--quiet",
            "-T0",
            "-U00000000-0000-0000-0000-000000000000",
            image,
            tree,
        ]
        subprocess.run(command, check=True, capture_output=True)
        content = image.read_bytes()
    return Layer(f"sha256:{hashlib.sha256(b'diff' + content).hexdigest()}", content)
