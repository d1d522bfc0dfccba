# SPDX-License-Identifier: Apache-2.0
"""The files of layers that the node brings: `DIFF-ID/DIGEST`, with the suffix `.part` until all is there.

The digest in a name is the file's own. Everything here blocks: call it in a thread.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
from collections.abc import Collection, Iterable
from pathlib import Path

import attrs

from infranetes_common.errors import (
    DataLoss,
    FailedPrecondition,
    InfranetesError,
    InvalidArgument,
    OutOfRange,
    ResourceExhausted,
    Unavailable,
)

_PART = ".part"
_NAME = re.compile(r"[0-9a-f]{64}")
_PIECE = 1024 * 1024
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@attrs.frozen
class BroughtLayer:
    """A layer that the node brings.

    :ivar size: bytes of the whole file. :ivar digest: the whole file's, sha256: and 64 hex digits.
    :ivar offset: bytes that arrived before.
    """

    diff_id: str
    size: int
    digest: str
    offset: int = 0


class Stopped(Exception):
    """The work is no longer wanted."""


class Stop:
    """Tells work in a thread that its result is no longer wanted."""

    def __init__(self) -> None:
        self._told = False

    def tell(self) -> None:
        """Make the work raise Stopped."""
        self._told = True

    def check(self) -> None:
        """Raise `Stopped` if `tell` was called."""
        if self._told:
            raise Stopped


class LayerFiles:
    """The files, in one directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def whole(self, diff_id: str) -> Path | None:
        """Return the file of a layer that has arrived; None if it has not."""
        return next((path for path in self._files(diff_id) if path.suffix != _PART), None)

    def arrived(self, diff_id: str) -> tuple[int, str]:
        """Return the number of bytes that have arrived of a layer, and their file's digest; 0, "": none."""
        for path in self._files(diff_id):
            with contextlib.suppress(FileNotFoundError):
                return path.stat().st_size, f"sha256:{path.stem}"
        return 0, ""

    def begin(self, layer: BroughtLayer, stop: Stop) -> Arrival:
        """Take more of a layer, after its offset. What arrived of another file for it is deleted.

        :raise OutOfRange: less than the offset is there. :raise ResourceExhausted: the disk is too full.
        """
        directory = self._of(layer.diff_id)
        path = directory / (_hex(layer.digest) + _PART)
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            for other in self._files(layer.diff_id):
                if other != path:
                    other.unlink()
            return Arrival(layer, path, stop)
        except OSError as error:
            raise _as_error(layer, path, error) from None

    def verify(self, diff_id: str, stop: Stop) -> None:
        """Check that a file that arrived before a reboot is unchanged.

        :raise DataLoss: it has changed, and was deleted.
        """
        path = self.whole(diff_id)
        if path is None:
            raise Unavailable(f"layer {diff_id} has been removed")
        try:
            with path.open("rb") as file:
                if _hashed(file.fileno(), file.seek(0, os.SEEK_END), stop).hexdigest() == path.name:
                    return
            words = "its digest is another"
        except OSError as error:
            words = str(error)
        self.remove(diff_id)
        raise DataLoss(
            f"layer {diff_id} is damaged on the VM's disk ({words}), and was deleted: send it again"
        )

    def remove(self, diff_id: str) -> None:
        """Delete everything that has arrived of a layer. Idempotent."""
        shutil.rmtree(self._of(diff_id), ignore_errors=True)

    def all(self) -> list[str]:
        """List the diff ids of all layers that have arrived, at least in part."""
        try:
            return [f"sha256:{name}" for name in os.listdir(self._directory) if _NAME.fullmatch(name)]
        except FileNotFoundError:
            return []

    def remove_parts(self, besides: Collection[str]) -> bool:
        """Delete what has arrived of layers that are not whole; return whether there was any.

        :param besides: the diff ids of layers that are arriving now.
        """
        parts = [
            path
            for diff_id in set(self.all()).difference(besides)
            for path in self._files(diff_id)
            if path.suffix == _PART
        ]
        for path in parts:
            path.unlink(missing_ok=True)
        return bool(parts)

    def _files(self, diff_id: str) -> list[Path]:
        """List a layer's files, whole ones first."""
        try:
            found = list(self._of(diff_id).iterdir())
        except FileNotFoundError:
            return []
        return sorted(found, key=lambda path: path.suffix == _PART)

    def _of(self, diff_id: str) -> Path:
        return self._directory / _hex(diff_id)


class Arrival:
    """A layer that is arriving: the bytes after its offset, in order."""

    def __init__(self, layer: BroughtLayer, path: Path, stop: Stop) -> None:
        self._layer = layer
        self._path = path
        self._size = layer.offset
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o600)
        try:
            self._resume(stop)
        except BaseException:
            self.close()
            raise

    def _resume(self, stop: Stop) -> None:
        layer, there = self._layer, os.fstat(self._descriptor).st_size
        if there < layer.offset:
            raise OutOfRange(
                f"layer {layer.diff_id}: {there} bytes of it are here, and the offset is {layer.offset}: "
                "begin at the offset that ListLayers says"
            )
        os.ftruncate(self._descriptor, layer.offset)
        system = os.fstatvfs(self._descriptor)
        if layer.size - layer.offset > system.f_bavail * system.f_frsize:
            raise OSError(errno.ENOSPC, "too little is free")
        # A hash's state can't be kept in a file, so hash the earlier bytes again.
        self._hash = _hashed(self._descriptor, layer.offset, stop)

    def write(self, pieces: Iterable[bytes]) -> None:
        """Add bytes.

        :raise InvalidArgument: they are more than the layer has.
        :raise ResourceExhausted: the disk is full; what had arrived is deleted.
        """
        for piece in pieces:
            if self._size + len(piece) > self._layer.size:
                raise InvalidArgument(f"layer {self._layer.diff_id}: over {self._layer.size} bytes were sent")
            try:
                left = memoryview(piece)
                while left:
                    left = left[os.write(self._descriptor, left) :]
            except OSError as error:
                raise _as_error(self._layer, self._path, error) from None
            self._hash.update(piece)
            self._size += len(piece)

    def finish(self) -> None:
        """Check that the layer is complete, and make its file a whole one.

        The container that waits for it does not wait for the disk: what a loss of power takes is found by
        `verify`, and the node sends it again.

        :raise InvalidArgument: bytes are missing; the others stay.
        :raise DataLoss: the layer is not the announced one, and was deleted.
        """
        layer = self._layer
        if self._size < layer.size:
            raise InvalidArgument(
                f"layer {layer.diff_id}: the data ended after {self._size} of {layer.size} bytes"
            )
        digest = self._hash.hexdigest()
        if digest != _hex(layer.digest):
            self._path.unlink(missing_ok=True)
            raise DataLoss(
                f"layer {layer.diff_id}: what arrived has the digest sha256:{digest} instead of "
                f"{layer.digest}, and was deleted: send it again from its beginning"
            )
        try:
            self._path.rename(self._path.with_suffix(""))
        except OSError as error:
            raise _as_error(layer, self._path, error) from None

    def close(self) -> None:
        """Close the file. Idempotent."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _hashed(descriptor: int, size: int, stop: Stop) -> hashlib._Hash:
    """Hash the first `size` bytes of a file, and leave its position after them."""
    found = hashlib.sha256()
    os.lseek(descriptor, 0, os.SEEK_SET)
    while size:
        stop.check()
        piece = os.read(descriptor, min(size, _PIECE))
        if not piece:
            raise OSError(errno.EIO, "it is shorter than it was")
        found.update(piece)
        size -= len(piece)
    return found


def _hex(digest: str) -> str:
    return digest.removeprefix("sha256:")


def _as_error(layer: BroughtLayer, path: Path, error: OSError) -> InfranetesError:
    what = f"layer {layer.diff_id} of {layer.size} bytes"
    if error.errno in _FULL:
        path.unlink(missing_ok=True)  # to make room: containers write to this disk as well
        return ResourceExhausted(
            f"{what}: the VM's disk is too full ({error.strerror}), and what had arrived is deleted: give "
            "the VM a larger disk"
        )
    return FailedPrecondition(f"{what} can't be written to the VM's disk: {error}")
