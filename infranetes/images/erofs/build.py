# SPDX-License-Identifier: Apache-2.0
"""Makes a layer's erofs image, in a child process that has no rights."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar, TypeVarTuple

import attrs

from infranetes.images.erofs.limits import BAD, FULL, INCOMPLETE, Limits
from infranetes.images.erofs.process import BuilderProcess, Ended
from infranetes.images.layer_disk import NeedsBelow
from infranetes_common.concurrency import IMAGES, run_in_thread, within
from infranetes_common.errors import FailedPrecondition, InfranetesError, ResourceExhausted
from infranetes_common.reactors import IReactor
from infranetes_common.redaction import redacted_end

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

PART = ".part"
"""Added to the target's name while it is written. What a killed daemon leaves is overwritten next time."""
_HASH_CHUNK = 1 << 20


@attrs.frozen
class BuiltLayer:
    """An image that is in its place.

    :ivar size: bytes. :ivar digest: sha256: and 64 hex digits of the image.
    """

    size: int
    digest: str


class Builder:
    """Makes layers' images. Call `stop` in the end, when none is being made."""

    def __init__(self, reactor: IReactor) -> None:
        self._reactor = reactor
        self._process = BuilderProcess(reactor)

    async def build(
        self,
        layer: Path,
        compression: str,
        target: Path,
        diff_id: str,
        limits: Limits,
        below: Sequence[Path] | None = None,
    ) -> BuiltLayer:
        """Make the erofs image of a layer. One call per target at a time.

        The image appears whole, synced and read-only, or not at all; the caller syncs its directory. When
        this is cancelled, the child has ended and nothing is left before `CancelledError` is raised.

        :param layer: its file. :param compression: gzip, zstd or nothing.
        :param target: where the image is to be; replaced if it is there.
        :param diff_id: sha256: and 64 hex digits of the layer's uncompressed tar, which is checked.
        :param below: the images of the layers below, lowest first; None: without them, if that will do.
        :raise NeedsBelow: it will not.
        :raise FailedPrecondition: the layer is malformed, above the limits or not the one of `diff_id`.
        :raise ResourceExhausted: the disk is full.
        :raise DeadlineExceeded: it took more than `limits.seconds`.
        """
        part = target.with_name(target.name + PART)
        files = _Files()
        try:
            await self._thread(files.thd_open, layer, part, below)
            making = self._make(files, compression, target, diff_id, limits)
            return await within(self._reactor, limits.seconds, making, f"making the disk of layer {diff_id}")
        except OSError as e:
            raise _os_error(e, diff_id, target) from None
        finally:
            await self._thread(files.thd_close, part)

    async def stop(self) -> None:
        """End the process. Idempotent."""
        await self._process.stop()

    async def _make(
        self, files: _Files, compression: str, target: Path, diff_id: str, limits: Limits
    ) -> BuiltLayer:
        ended = await self._process.make(
            (files.layer, files.image), files.below, compression, diff_id, limits
        )
        if ended.code:
            raise _error(ended, diff_id, target)
        stop = threading.Event()
        return await self._thread(_thd_finish, files.image, target, stop, on_cancel=stop.set)

    async def _thread(
        self, work: Callable[[*Ts], T], *args: *Ts, on_cancel: Callable[[], None] | None = None
    ) -> T:
        return await run_in_thread(self._reactor, work, *args, on_cancel=on_cancel, purpose=IMAGES)


class _Files:
    """The layer, the image, and those of the layers below, open."""

    def __init__(self) -> None:
        self.layer = self.image = -1
        self.below: list[int] | None = None

    def thd_open(self, layer: Path, part: Path, below: Sequence[Path] | None) -> None:
        flags = os.O_CLOEXEC | os.O_NOFOLLOW
        part.unlink(missing_ok=True)
        self.layer = os.open(layer, os.O_RDONLY | flags)
        self.image = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flags, 0o400)
        if below is not None:
            self.below = []
            for path in below:
                self.below.append(os.open(path, os.O_RDONLY | flags))

    def thd_close(self, part: Path) -> None:
        """Close them, and remove the image if it did not get its name."""
        part.unlink(missing_ok=True)
        for descriptor in (self.layer, self.image, *(self.below or ())):
            if descriptor >= 0:
                os.close(descriptor)


def _thd_finish(image: int, target: Path, stop: threading.Event) -> BuiltLayer:
    """Sync and sum the image, both at once, and give it its name unless `stop` is set meanwhile."""
    part = target.with_name(target.name + PART)
    with ThreadPoolExecutor(1) as pool:
        synced = pool.submit(os.fsync, image)
        built = _thd_sum(part, stop)
        synced.result()
    if not stop.is_set():
        part.replace(target)
    return built


def _thd_sum(path: Path, stop: threading.Event) -> BuiltLayer:
    summed, size = hashlib.sha256(), 0
    chunk = memoryview(bytearray(_HASH_CHUNK))  # reused: getting new memory takes half as long as reading
    with open(path, "rb", buffering=0) as file:
        while not stop.is_set() and (read := file.readinto(chunk)):
            summed.update(chunk[:read])
            size += read
    return BuiltLayer(size, f"sha256:{summed.hexdigest()}")


def _error(ended: Ended, diff_id: str, target: Path) -> InfranetesError:
    code, why = ended.code, "".join(c if c.isprintable() else " " for c in ended.reason)
    if code in (BAD, INCOMPLETE):
        kind = NeedsBelow if code == INCOMPLETE else FailedPrecondition
        return kind(f"layer {diff_id} can't be used: {why}")
    if code == FULL:
        return _full(diff_id, target)
    how = f"ended with exit code {code}" if code >= 0 else f"was killed by signal {-code}"
    return InfranetesError(
        f"the process that makes the disk of layer {diff_id} {how}: {redacted_end(why, 500)}"
    )


def _full(diff_id: str, target: Path) -> ResourceExhausted:
    return ResourceExhausted(
        f"there is no room for the disk of layer {diff_id} in {target.parent}; "
        "remove images or make room there"
    )


def _os_error(error: OSError, diff_id: str, target: Path) -> InfranetesError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _full(diff_id, target)
    return FailedPrecondition(
        f"the disk of layer {diff_id} can't be made in {target.parent}: {error.strerror}"
    )
