# SPDX-License-Identifier: Apache-2.0
"""The image that installs on nodes, unpacked as a container's root, and releases of it that are made here."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from delivery.debian import LOADER
from tests.e2e.cleanroot import TREE, NotMade
from tests.harness.needs import GUEST_IMAGES, IMAGES_VARIABLE

_IMAGE = TREE / "build" / "node-image.oci.tar"
_WITH_GUEST = TREE / "build" / "node-image-guest.oci.tar"


def make() -> None:
    """Build the image of this tree (minutes)."""
    _build(_IMAGE)


def make_with_guest() -> None:
    """Build it with the guest image that tests boot (minutes)."""
    _build(_WITH_GUEST, "--guest", os.environ.get(IMAGES_VARIABLE) or str(GUEST_IMAGES))


def _build(*words: str | Path) -> None:
    with (TREE / "build" / "node-image.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run([sys.executable, "-m", "delivery.oci", *words], cwd=TREE, check=True)


def with_guest() -> Path:
    """Return the archive with a guest image, which was made before."""
    if not _WITH_GUEST.exists():
        raise NotMade(_WITH_GUEST)
    return _WITH_GUEST


class NodeImage:
    """A container's root. :ivar home: the tree that it brings, as the container sees it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (tree,) = (root / "opt/infranetes").iterdir()
        self.name = tree.name
        self.home = f"/opt/infranetes/{tree.name}"

    @classmethod
    def unpacked(cls, root: Path) -> NodeImage:
        """Unpack the image that was made before into a directory."""
        if not _IMAGE.exists():
            raise NotMade(_IMAGE)
        root.mkdir(parents=True)
        with tempfile.TemporaryDirectory(dir=root.parent) as scratch, tarfile.open(_IMAGE) as archive:
            archive.extractall(scratch, filter="data")
            blobs = Path(scratch) / "blobs/sha256"
            (manifest,) = json.loads((Path(scratch) / "index.json").read_text())["manifests"]
            layers = json.loads((blobs / manifest["digest"][7:]).read_text())["layers"]
            for layer in layers:
                subprocess.run(["tar", "-xzf", blobs / layer["digest"][7:], "-C", root], check=True)
        return cls(root)

    def another(self, root: Path, name: str) -> NodeImage:
        """Make another release: the same tree by another name, which its programs have in them."""
        shutil.copytree(self.root, root, symlinks=True)
        (root / self.home.lstrip("/")).rename(root / "opt/infranetes" / name)
        made = NodeImage(root)
        tree = root / made.home.lstrip("/")
        texts = [tree / "usr/lib/python3.11/sitecustomize.py"]
        for path in [*(tree / "usr/bin").iterdir(), *(tree / "usr/libexec").rglob("nft")]:
            if path.is_symlink() or path.is_dir():
                continue
            if path.read_bytes()[:2] == b"#!":
                texts.append(path)
                continue
            asked = ("patchelf", "--print-rpath", path)
            said = subprocess.run(asked, check=True, capture_output=True, text=True).stdout
            libraries = said.strip().replace(self.home, made.home)
            command = ["patchelf", "--set-interpreter", f"{libraries}/{LOADER}", "--force-rpath"]
            subprocess.run([*command, "--set-rpath", libraries, path], check=True)
        for path in texts:
            path.write_text(path.read_text().replace(self.home, made.home))
        return made
