# SPDX-License-Identifier: Apache-2.0
"""Build the image that installs Infranetes on nodes: `python -m delivery.oci FILE`, which `make oci` calls.

An OCI archive, made without a daemon and without a registry's image below it: one layer is the node's tree
(`tree.py`), whose Python is what the image runs. With `--guest` another one has a guest image, so that nodes
needn't build it. Of the same releases of Debian's packages, the same code and the same SOURCE_DATE_EPOCH it
is
the same bytes.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import attrs

from delivery import recipe, tree, wheels
from infranetes.guest import image as guests
from infranetes.guest.container_disk import write_archive
from infranetes.installer.trees import COMPRESSED
from infranetes_common import __version__

_OCI = "application/vnd.oci.image."
GUEST = f"{recipe.HOME}/guest-image"
_GUEST_DISK = "disk.raw"
_GUEST_FILES = ("vmlinuz", "initrd", "manifest.json")
_CHUNK = 1 << 20


@attrs.frozen
class Layer:
    """A layer that is written. :ivar what: what it has, for people. :ivar plain: bytes of its tar."""

    what: str
    digest: str
    diff_id: str
    size: int
    plain: int

    @property
    def descriptor(self) -> dict[str, object]:
        """How a manifest names it."""
        return {"mediaType": _OCI + "layer.v1.tar+gzip", "digest": self.digest, "size": self.size}


class _Writes(Protocol):
    """What takes bytes one after the other."""

    def write(self, data: bytes, /) -> int: ...


class _Summed(io.RawIOBase):
    """A file that sums what is written to it."""

    def __init__(self, file: _Writes) -> None:
        self._file = file
        self.summed = hashlib.sha256()
        self.size = 0

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]
        self.summed.update(data)
        self.size += len(data)
        return self._file.write(data)

    @property
    def digest(self) -> str:
        """The digest of all that was written."""
        return f"sha256:{self.summed.hexdigest()}"


def members(top: Path, when: int) -> Iterator[tuple[tarfile.TarInfo, Path]]:
    """Yield the files below a directory as root's, in one order and of one time."""
    for path in sorted(top.rglob("*"), key=lambda each: each.relative_to(top).parts):
        member = tarfile.TarInfo(str(path.relative_to(top)))
        status = path.lstat()
        member.mtime, member.mode = when, status.st_mode & 0o777
        if path.is_symlink():
            member.type, member.linkname, member.mode = tarfile.SYMTYPE, os.readlink(path), 0o777
        elif path.is_dir():
            member.type = tarfile.DIRTYPE
        else:
            member.size = status.st_size
        yield member, path


def write_layer(what: str, top: Path, blobs: Path, when: int) -> Layer:
    """Write the layer that has what is below a directory."""
    part = blobs / "layer"
    with part.open("wb") as file:
        compressed = _Summed(file)
        with gzip.GzipFile("", "wb", 9, compressed, mtime=0) as zipped:
            plain = _Summed(zipped)
            with tarfile.open(fileobj=plain, mode="w|", format=tarfile.PAX_FORMAT) as tar:
                for member, path in members(top, when):
                    with path.open("rb") if member.isreg() else io.BytesIO() as source:
                        tar.addfile(member, source)
    part.rename(blobs / compressed.digest.removeprefix("sha256:"))
    return Layer(what, compressed.digest, plain.digest, compressed.size, plain.size)


def write_layout(layout: Path, layers: Sequence[Layer], id: str, when: int) -> str:
    """Write the documents of an image beside its layers; return its digest."""
    blobs = layout / "blobs" / "sha256"
    created = f"{when_text(when)}"

    def blob(media_type: str, document: object) -> dict[str, object]:
        data = json.dumps(document, separators=(",", ":"), sort_keys=True).encode()
        summed = hashlib.sha256(data).hexdigest()
        (blobs / summed).write_bytes(data)
        return {"mediaType": media_type, "digest": f"sha256:{summed}", "size": len(data)}

    home = f"{recipe.HOME}/{id}"
    python = f"{home}/usr/bin/python3"
    config = blob(
        _OCI + "config.v1+json",
        {
            "architecture": "amd64",
            "os": "linux",
            "created": created,
            "config": {
                "Entrypoint": [python, "-I", "-m", "infranetes.installer"],
                "Env": [f"PATH={home}/usr/bin", "LC_ALL=C.UTF-8", f"INFRANETES_TREE={home}"],
                "Labels": {
                    "org.opencontainers.image.title": "infranetes",
                    "org.opencontainers.image.version": __version__,
                    "org.opencontainers.image.licenses": "Apache-2.0",
                    "io.infranetes.tree": id,
                },
            },
            "rootfs": {"type": "layers", "diff_ids": [each.diff_id for each in layers]},
            "history": [{"created": created, "created_by": each.what} for each in layers],
        },
    )
    manifest = blob(
        _OCI + "manifest.v1+json",
        {
            "schemaVersion": 2,
            "mediaType": _OCI + "manifest.v1+json",
            "config": config,
            "layers": [each.descriptor for each in layers],
        },
    )
    named = {**manifest, "annotations": {"org.opencontainers.image.ref.name": __version__}}
    (layout / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [named]}))
    (layout / "oci-layout").write_text(json.dumps({"imageLayoutVersion": "1.0.0"}))
    return str(manifest["digest"])


def when_text(when: int) -> str:
    """Return a time as OCI's documents have it."""
    from datetime import UTC, datetime

    return datetime.fromtimestamp(when, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def guest_layer(directory: Path, top: Path) -> None:
    """Lay out the guest image that is in use as the layer has it.

    Its disk is compressed there too: a runtime that unpacks the layer would fill the disk's holes, which are
    gigabytes."""
    image = guests.current(directory)
    target = top / GUEST.lstrip("/") / image.key
    target.mkdir(parents=True)
    for name in _GUEST_FILES:
        shutil.copy(image.directory / name, target / name)
    with (
        (image.directory / _GUEST_DISK).open("rb") as disk,
        (target / f"{_GUEST_DISK}{COMPRESSED}").open("wb") as file,
        gzip.GzipFile("", "wb", 6, file, mtime=0) as zipped,
    ):
        shutil.copyfileobj(disk, zipped, _CHUNK)


def build(target: Path, work: Path, guest: Path | None) -> None:
    """Build the image, and say how large it is."""
    when = wheels.epoch()
    own, newer, versions = tree.unpacked(work)
    with tempfile.TemporaryDirectory(dir=work) as name:
        scratch = Path(name)
        subprocess.run([sys.executable, "-m", "delivery.wheels", scratch / "dist"], check=True, cwd=tree.TREE)
        built = sorted((scratch / "dist").glob("*.whl"))
        id = tree.identity(versions, built, __version__)
        made = tree.Tree(scratch / "tree", own, newer, id)
        made.make(built)
        layout = scratch / "layout"
        blobs = layout / "blobs" / "sha256"
        blobs.mkdir(parents=True)
        layers = [
            write_layer("Infranetes, its Python, QEMU and their libraries", scratch / "tree", blobs, when)
        ]
        if guest is not None:
            guest_layer(guest, scratch / "guest")
            layers.append(write_layer("the guest image", scratch / "guest", blobs, when))
        digest = write_layout(layout, layers, id, when)
        write_archive(layout, target)
    for layer in layers:
        print(f"{layer.what}: {layer.size / 1e6:.1f} MB, {layer.plain / 1e6:.1f} MB on the node")
    print(f"{target}: {target.stat().st_size / 1e6:.1f} MB, tree {id}, {digest}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m delivery.oci", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument(
        "--guest", type=Path, metavar="DIRECTORY", help="have the guest image that is there, too"
    )
    parser.add_argument("--work", type=Path, default=tree.TREE / "build" / "node-tree", metavar="DIRECTORY")
    options = parser.parse_args(arguments)
    for program in ("mmdebstrap", "patchelf"):
        if shutil.which(program) is None:
            raise SystemExit(f"{program} is missing: apt-get install {program}")
    options.work.mkdir(parents=True, exist_ok=True)
    build(options.file.absolute(), options.work, options.guest)


if __name__ == "__main__":
    main()
