# SPDX-License-Identifier: Apache-2.0
"""Makes a layer's erofs image, in a child process that has no rights."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs
from twisted.internet.error import ProcessExitedAlready
from twisted.internet.interfaces import IProcessTransport
from twisted.internet.protocol import ProcessProtocol
from twisted.python.failure import Failure

from infranetes.commands import ENVIRONMENT, exit_code, find_program
from infranetes.images.erofs.limits import BAD, FULL, Limits
from infranetes_common.concurrency import (
    IMAGES,
    Event,
    run_in_thread,
    sync_directory,
    until_ended,
    within,
)
from infranetes_common.errors import FailedPrecondition, InfranetesError, ResourceExhausted
from infranetes_common.reactors import IReactor

PART = ".part"
"""Added to the target's name while it is written. What a killed daemon leaves is overwritten next time."""
_SAID_BYTES = 2000
_HASH_CHUNK = 1 << 20


@attrs.frozen
class Built:
    """An image that is in its place.

    :ivar size: bytes. :ivar digest: sha256: and 64 hex digits of the image.
    """

    size: int
    digest: str


async def build(
    reactor: IReactor, layer: Path, compression: str, target: Path, diff_id: str, limits: Limits
) -> Built:
    """Make the erofs image of a layer. One call per target at a time.

    The image appears whole, synced and read-only, or not at all. When this is cancelled, the child has ended
    and nothing is left before `CancelledError` is raised.

    :param layer: its file. :param compression: gzip, zstd or nothing.
    :param target: where the image is to be; replaced if it is there.
    :param diff_id: sha256: and 64 hex digits of the layer's uncompressed tar, which is checked.
    :raise FailedPrecondition: the layer is malformed, above the limits or not the one of `diff_id`.
    :raise ResourceExhausted: the disk is full.
    :raise DeadlineExceeded: it took more than `limits.seconds`.
    """
    part = target.with_name(target.name + PART)
    files = _Files()
    try:
        await run_in_thread(reactor, files.thd_open, layer, part, purpose=IMAGES)
        making = _make(reactor, files, compression, target, diff_id, limits)
        return await within(reactor, limits.seconds, making, f"making the disk of layer {diff_id}")
    except OSError as e:
        raise _os_error(e, diff_id, target) from None
    finally:
        await run_in_thread(reactor, files.thd_close, part, purpose=IMAGES)


async def _make(
    reactor: IReactor, files: _Files, compression: str, target: Path, diff_id: str, limits: Limits
) -> Built:
    """Let the child work. However this ends, the child has ended, too."""
    child = _start(reactor, files, compression, diff_id, limits)
    try:
        code = await child.ended.wait()
    finally:
        child.kill()
        await until_ended(child.ended.wait())
    if code:
        raise _error(code, child.said.decode(errors="replace"), diff_id, target)
    stop = threading.Event()
    return await run_in_thread(
        reactor, _thd_finish, files.image, target, stop, on_cancel=stop.set, purpose=IMAGES
    )


class _Files:
    """The layer and the image, open."""

    def __init__(self) -> None:
        self.layer = self.image = -1

    def thd_open(self, layer: Path, part: Path) -> None:
        flags = os.O_CLOEXEC | os.O_NOFOLLOW
        part.unlink(missing_ok=True)
        self.layer = os.open(layer, os.O_RDONLY | flags)
        self.image = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flags, 0o400)

    def thd_close(self, part: Path) -> None:
        """Close them, and remove the image if it did not get its name."""
        part.unlink(missing_ok=True)
        for descriptor in (self.layer, self.image):
            if descriptor >= 0:
                os.close(descriptor)


class _Child(ProcessProtocol):
    """The child.

    :ivar ended: with its exit code, or minus the signal that ended it. :ivar said: why it failed.
    """

    transport: IProcessTransport

    def __init__(self) -> None:
        self.ended: Event[int] = Event()
        self.said = b""

    def errReceived(self, data: bytes) -> None:
        self.said += data[: _SAID_BYTES - len(self.said)]

    def processEnded(self, reason: Failure) -> None:
        self.ended.succeed(exit_code(reason))

    def kill(self) -> None:
        with contextlib.suppress(ProcessExitedAlready):
            self.transport.signalProcess("KILL")


def _start(reactor: IReactor, files: _Files, compression: str, diff_id: str, limits: Limits) -> _Child:
    order = json.dumps({"compression": compression, "diff_id": diff_id, "limits": attrs.asdict(limits)})
    command = [*_wrapping(), sys.executable, "-I", "-m", "infranetes.images.erofs", order]
    child = _Child()
    reactor.spawnProcess(
        child,
        find_program(command[0]),
        command,
        env={**ENVIRONMENT, "MALLOC_ARENA_MAX": "1"},  # each further one counts as 64 MiB of address space
        path="/",
        childFDs={0: files.layer, 1: files.image, 2: "r"},
    )
    return child


def _wrapping() -> Sequence[str]:
    """What takes the rights that are taken before Python starts; the child itself changes its user.

    So Python need not be readable for others.
    """
    drop = ["setpriv", "--no-new-privs", "--pdeathsig=KILL"]
    if os.geteuid() == 0:
        drop += ["--inh-caps=-all", "--ambient-caps=-all", "--bounding-set=-all,+setuid,+setgid"]
    return [*drop, "--"]


def _thd_finish(image: int, target: Path, stop: threading.Event) -> Built:
    """Sync and sum the image, both at once, and give it its name unless `stop` is set meanwhile."""
    part = target.with_name(target.name + PART)
    with ThreadPoolExecutor(1) as pool:
        synced = pool.submit(os.fsync, image)
        built = _thd_sum(part, stop)
        synced.result()
    if not stop.is_set():
        part.replace(target)
        sync_directory(target.parent)
    return built


def _thd_sum(path: Path, stop: threading.Event) -> Built:
    summed, size = hashlib.sha256(), 0
    with open(path, "rb", buffering=0) as file:
        while not stop.is_set() and (chunk := file.read(_HASH_CHUNK)):
            summed.update(chunk)
            size += len(chunk)
    return Built(size, f"sha256:{summed.hexdigest()}")


def _error(code: int, said: str, diff_id: str, target: Path) -> InfranetesError:
    why = "".join(c if c.isprintable() else " " for c in said)
    if code == BAD:
        return FailedPrecondition(f"layer {diff_id} can't be used: {why}")
    if code == FULL:
        return _full(diff_id, target)
    how = f"ended with exit code {code}" if code >= 0 else f"was killed by signal {-code}"
    return InfranetesError(f"the process that makes the disk of layer {diff_id} {how}: {why[-500:]}")


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
