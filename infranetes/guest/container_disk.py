# SPDX-License-Identifier: Apache-2.0
"""An OCI image of one layer, which has a machine's disk in /disk: KubeVirt's containerDisk. Or which is one.

The same disk gives the same bytes, so that a registry has it once.
"""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import attrs

from infranetes.images.manifest import digest_of

_CHUNK = 1 << 20
_LEVEL = 1  # of gzip: a disk that is compressed gains nothing by more, and others take a minute a GiB
_OWNER = 107  # QEMU's user, which KubeVirt's disks belong to
_SAY_EVERY = 1 << 30  # bytes
_OCI = "application/vnd.oci.image."


@attrs.frozen
class BuiltLayout:
    """An image in an OCI layout.

    :ivar digest: of its manifest. :ivar size: bytes of its blobs.
    """

    digest: str
    size: int


@attrs.frozen
class _Blob:
    """A blob that was written."""

    media_type: str
    digest: str
    size: int

    @property
    def descriptor(self) -> dict[str, object]:
        return {"mediaType": self.media_type, "digest": self.digest, "size": self.size}


def write_layout(
    disk: Path,
    layout: Path,
    tag: str,
    architecture: str,
    labels: dict[str, str],
    progress: Callable[[str], None],
    artifact: str = "",
) -> BuiltLayout:
    """Write an image of a disk into an empty directory. Blocks.

    :param tag: that it has in the layout. :param architecture: of the machines that boot it, such as amd64.
    :param artifact: the layer is the disk's file itself, of this media type; "": it has it in /disk.
    """
    blobs = layout / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    if artifact:
        layer, diff_ids = _copied(disk, blobs, artifact, progress), []
    else:
        layer, diff_id = _layer(disk, blobs, progress)
        diff_ids = [diff_id]
    config = _json(
        blobs,
        _OCI + "config.v1+json",
        {
            "architecture": architecture,
            "os": "linux",
            "config": {"Labels": labels} if labels else {},
            "rootfs": {"type": "layers", "diff_ids": diff_ids},
            "history": [{"created_by": "infranetes-guest image build"}],
        },
    )
    manifest = _json(
        blobs,
        _OCI + "manifest.v1+json",
        {
            "schemaVersion": 2,
            "mediaType": _OCI + "manifest.v1+json",
            "config": config.descriptor,
            "layers": [layer.descriptor],
            **({"artifactType": artifact} if artifact else {}),
        },
    )
    named = {**manifest.descriptor, "annotations": {"org.opencontainers.image.ref.name": tag}}
    (layout / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [named]}))
    (layout / "oci-layout").write_text(json.dumps({"imageLayoutVersion": "1.0.0"}))
    return BuiltLayout(manifest.digest, layer.size + config.size + manifest.size)


def write_archive(layout: Path, target: Path) -> None:
    """Write a layout as an archive, whole or not at all. Blocks."""
    part = target.with_name(f".{target.name}.part")
    try:
        with tarfile.open(part, "w", format=tarfile.GNU_FORMAT) as archive:
            for path in sorted(layout.rglob("*")):
                archive.add(path, str(path.relative_to(layout)), recursive=False, filter=_plain)
        part.replace(target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mtime = 0
    member.mode = 0o755 if member.isdir() else 0o644
    return member


def _json(blobs: Path, media_type: str, document: object) -> _Blob:
    data = json.dumps(document, separators=(",", ":")).encode()
    digest = digest_of(data)
    (blobs / digest.removeprefix("sha256:")).write_bytes(data)
    return _Blob(media_type, digest, len(data))


class _Layer:
    """A layer that is written: what goes into its tar, and what comes out compressed, both summed."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._deflate = zlib.compressobj(_LEVEL, zlib.DEFLATED, 31)
        self._tar = hashlib.sha256()
        self._blob = hashlib.sha256()
        self.size = 0

    @property
    def diff_id(self) -> str:
        return f"sha256:{self._tar.hexdigest()}"

    @property
    def digest(self) -> str:
        return f"sha256:{self._blob.hexdigest()}"

    def write(self, data: bytes) -> None:
        self._tar.update(data)
        self._out(self._deflate.compress(data))

    def finish(self) -> None:
        self._out(self._deflate.flush())

    def _out(self, data: bytes) -> None:
        self._blob.update(data)
        self._file.write(data)
        self.size += len(data)


def _copied(disk: Path, blobs: Path, media_type: str, progress: Callable[[str], None]) -> _Blob:
    """Write the disk's file as a blob."""
    part, summed = blobs / "layer", hashlib.sha256()
    with open(disk, "rb") as source, open(part, "wb") as file:
        for data in _pieces(source, disk, progress):
            summed.update(data)
            file.write(data)
        size = file.tell()
    part.rename(blobs / summed.hexdigest())
    return _Blob(media_type, f"sha256:{summed.hexdigest()}", size)


def _pieces(source: BinaryIO, disk: Path, progress: Callable[[str], None]) -> Iterator[bytes]:
    """Yield a file's content, as much as it had at the beginning."""
    size = os.fstat(source.fileno()).st_size
    done = 0
    while done < size:
        data = source.read(min(_CHUNK, size - done))
        if not data:
            raise OSError(0, "it became shorter while it was read", str(disk))
        yield data
        if (done + len(data)) // _SAY_EVERY > done // _SAY_EVERY:
            progress(f"{(done + len(data)) // _CHUNK} of {size // _CHUNK} MiB are in the layer")
        done += len(data)


def _layer(disk: Path, blobs: Path, progress: Callable[[str], None]) -> tuple[_Blob, str]:
    """Write the layer; return it, and the digest of its tar."""
    part = blobs / "layer"
    with open(disk, "rb") as source, open(part, "wb") as file:
        size = os.fstat(source.fileno()).st_size
        layer = _Layer(file)
        layer.write(_header("disk/", tarfile.DIRTYPE, 0o755, 0))
        layer.write(_header(f"disk/{disk.name}", tarfile.REGTYPE, 0o440, size))
        for data in _pieces(source, disk, progress):
            layer.write(data)
        layer.write(bytes(-size % tarfile.BLOCKSIZE + 2 * tarfile.BLOCKSIZE))
        layer.finish()
    part.rename(blobs / layer.digest.removeprefix("sha256:"))
    return _Blob(_OCI + "layer.v1.tar+gzip", layer.digest, layer.size), layer.diff_id


def _header(name: str, kind: bytes, mode: int, size: int) -> bytes:
    member = tarfile.TarInfo(name)
    member.type, member.mode, member.size = kind, mode, size
    member.uid = member.gid = _OWNER
    return member.tobuf(tarfile.GNU_FORMAT)
