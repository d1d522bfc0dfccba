# SPDX-License-Identifier: Apache-2.0
"""Small layers as erofs file systems, made by Debian's mkfs.erofs."""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

UUID = "00000000-0000-0000-0000-000000000000"  # fixed, so that equal trees give equal images


class Layer:
    """A layer's file system, and the layer's name, which can't be computed from the file system."""

    def __init__(self, diff_id: str, content: bytes) -> None:
        self._diff_id = diff_id
        self._content = content

    @property
    def diff_id(self) -> str:
        """The name."""
        return self._diff_id

    @property
    def content(self) -> bytes:
        """The file system."""
        return self._content

    @property
    def digest(self) -> str:
        """The digest of the file system."""
        return f"sha256:{hashlib.sha256(self.content).hexdigest()}"


class _LayerOf(Layer):
    """A layer of files that is made when it is first asked for, so that modules can have it as a constant."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._files = tuple(files.items())

    @property
    def diff_id(self) -> str:
        return f"sha256:{hashlib.sha256(b'diff' + self.content).hexdigest()}"

    @property
    def content(self) -> bytes:
        return _make(self._files)


def layer(files: Mapping[str, bytes]) -> Layer:
    """Make a layer of these files, by path. An empty file `.wh.NAME` becomes a whiteout of NAME.

    `.wh..wh..opq` makes its directory opaque. Its name is made up.
    """
    return _LayerOf(files)


@functools.cache
def _make(files: tuple[tuple[str, bytes], ...]) -> bytes:
    with tempfile.TemporaryDirectory() as made:
        tree, image = Path(made, "tree"), Path(made, "image")
        tree.mkdir()
        for name, content in files:
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
        return image.read_bytes()
