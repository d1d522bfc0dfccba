# SPDX-License-Identifier: Apache-2.0
"""Has disks taken out of images and looked at: by programs without rights, within limits and a deadline."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import TypeVar, TypeVarTuple

import attrs
import cattrs
from twisted.internet.defer import TimeoutError as DeferredTimeout

from infranetes.images.erofs.limits import BAD, FULL
from infranetes.images.machine.bases import full
from infranetes.images.machine.disk import DiskFormat
from infranetes.images.machine.limits import DiskLimits
from infranetes.images.machine.orders import Answer, Order
from infranetes.images.store import LayerFile
from infranetes_common import bounded_json
from infranetes_common.commands import Command, Output, Running, find_program
from infranetes_common.concurrency import IMAGES, run_in_thread
from infranetes_common.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InfranetesError,
    ResourceExhausted,
)
from infranetes_common.reactors import IReactor
from infranetes_common.redaction import redacted_end

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

Progress = Callable[[str], None]

MODE = 0o444
"""Of a base: QEMU opens it again by its descriptor. Nobody else gets into the directory."""
_WATCH_SECONDS = 1.0
_MOST_WORDS = 400
_MIB = 1 << 20
_ENVIRONMENT = {"MALLOC_ARENA_MAX": "1"}  # each further arena counts as 64 MiB of address space
_LEAKS = 3  # qemu-img check: sound, but with clusters that nothing uses


@attrs.frozen
class DiskSource:
    """The source of a disk.

    :ivar layers: of an image, lowest first; none: it is in `file`.
    :ivar file: the disk's file, which may be compressed. :ivar lent: nobody writes to it or changes it, so
        that the disk may be that file itself, under a further name.
    :ivar digest: of `file`, if it is known; it is computed otherwise.
    :ivar format: that is said of the disk; None: its content tells.
    """

    layers: Sequence[LayerFile] = ()
    file: Path | None = None
    lent: bool = False
    digest: str = ""
    format: DiskFormat | None = None


class Workshop:
    """Makes bases' files.

    :param limits: that hold now. :param qemu_img: the program. :param architecture: of VMs, such as amd64.
    """

    def __init__(
        self, reactor: IReactor, limits: Callable[[], DiskLimits], qemu_img: str, architecture: str
    ) -> None:
        self._reactor = reactor
        self._limits = limits
        self._qemu_img = qemu_img
        self._architecture = architecture

    async def make(self, source: DiskSource, target: Path, what: str, progress: Progress) -> Answer:
        """Make a disk's file, whole and inspected, at a path where nothing is, or leave nothing.

        :param what: the image's name, for messages.
        :raise FailedPrecondition: the disk can't be used; says why, and what to do.
        :raise ResourceExhausted: there is no room for it.
        :raise DeadlineExceeded: it took too long.
        """
        try:
            answer = await self._written(source, target, what, progress)
            progress(f"looking at the disk of image {what}")
            await self._look(target, answer, what)
            return attrs.evolve(answer, digest=answer.digest or source.digest)
        except BaseException as error:
            with contextlib.suppress(OSError):
                await self._thread(target.unlink, True)
            if isinstance(error, OSError):
                raise full(error, target.parent) from None
            raise

    async def look(self, file: Path, declared: DiskFormat | None, what: str) -> Answer:
        """Look at a file that is a disk, and is not compressed. Raises as `make`."""
        async with self._open([file]) as (descriptor,):
            order = attrs.evolve(self._order(declared), file=descriptor, keep=True)
            answer = await self._work(order, what)
        await self._look(file, answer, what)
        return answer

    async def _written(self, source: DiskSource, target: Path, what: str, progress: Progress) -> Answer:
        files = [each.path for each in source.layers] or [source.file or target]
        out = await self._thread(
            os.open, target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, MODE
        )
        try:
            os.fchmod(out, MODE)  # whatever the umask is
            async with self._open(files) as descriptors:
                order = attrs.evolve(self._order(source.format), target=out)
                if source.layers:
                    pairs = zip(descriptors, source.layers, strict=True)
                    layers = tuple((descriptor, layer.compression) for descriptor, layer in pairs)
                    order = attrs.evolve(order, layers=layers)
                else:
                    order = attrs.evolve(order, file=descriptors[0], keep=source.lent)
                answer = await self._work(order, what, progress)
        finally:
            await self._thread(os.close, out)
        if not answer.written:
            await self._thread(_thd_link, files[0], target)
        return answer

    def _order(self, said: DiskFormat | None) -> Order:
        return Order(
            os.getpid(),
            self._limits(),
            format=said.value if said else "",
            architecture=self._architecture,
        )

    async def _work(self, order: Order, what: str, progress: Progress = lambda words: None) -> Answer:
        """Have the worker do something."""
        inherited = [
            each for each in (order.file, order.target, *(one for one, _ in order.layers)) if each >= 0
        ]
        written = -1

        def watch() -> None:
            nonlocal written
            now = os.fstat(order.target).st_blocks * 512 // _MIB if order.target >= 0 else written
            if now > written:
                written = now
                progress(f"taking the disk out of image {what}: {now} MiB so far")

        output = await self._run(order, (), inherited, what, watch)
        if output.code:
            raise _failure(output, what)
        return cattrs.structure(bounded_json.loads(output.stdout), Answer)

    async def _look(self, disk: Path, answer: Answer, what: str) -> None:
        """Have qemu-img look at a disk, so that QEMU, which comes next, meets nothing that it can't read."""
        if answer.format != DiskFormat.QCOW2.value:
            return  # there is nothing to read
        program = find_program(self._qemu_img, "install Debian's qemu-utils")
        async with self._open([disk]) as (descriptor,):
            order = self._order(None)
            file = f"driver=qcow2,file.driver=file,file.filename=/proc/self/fd/{descriptor}"
            words = ["--output=json", "--image-opts", file]
            info = await self._run(order, (program, "info", *words), [descriptor], what)
            if info.code:
                raise _unreadable(info, what)
            _check_info(info.stdout, answer, what)
            check = await self._run(order, (program, "check", *words), [descriptor], what)
        if check.code not in (0, _LEAKS):
            raise _unreadable(check, what)

    async def _run(
        self,
        order: Order,
        program: Sequence[str],
        inherited: Sequence[int],
        what: str,
        watch: Callable[[], None] = lambda: None,
    ) -> Output:
        worker = [sys.executable, "-I", "-m", "infranetes.images.machine.worker"]
        words = [*worker, json.dumps(attrs.asdict(order)), *program]
        command = Command(words, None, inherited=inherited, environment=_ENVIRONMENT)
        seconds = order.limits.seconds
        until = self._reactor.seconds() + seconds
        running = Running(self._reactor, command)
        try:
            while not running.ended.happened:
                left = until - self._reactor.seconds()
                if left <= 0:
                    raise DeadlineExceeded(f"image {what}: its disk could not be read within {seconds:g} s")
                with contextlib.suppress(DeferredTimeout):
                    await running.ended.wait().addTimeout(min(_WATCH_SECONDS, left), self._reactor)
                watch()
        finally:
            await running.stop()
        return await running.ended.wait()

    @contextlib.asynccontextmanager
    async def _open(self, files: Sequence[Path]) -> AsyncIterator[list[int]]:
        """Open files, which may be on a disk that is slow or a server that is gone."""
        descriptors: list[int] = []
        try:
            await self._thread(_thd_open, files, descriptors)
            yield descriptors
        finally:
            await self._thread(_thd_close, descriptors)

    async def _thread(self, work: Callable[[*Ts], T], *args: *Ts) -> T:
        return await run_in_thread(self._reactor, work, *args, purpose=IMAGES)


def _thd_open(files: Sequence[Path], descriptors: list[int]) -> None:
    for path in files:
        descriptors.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))


def _thd_close(descriptors: Sequence[int]) -> None:
    for each in descriptors:
        os.close(each)


def _thd_link(file: Path, target: Path) -> None:
    """Give a file another name, in the place of an empty one."""
    target.unlink()
    file.chmod(MODE)
    os.link(file, target)


def _check_info(said: bytes, answer: Answer, what: str) -> None:
    """Check that qemu-img has read the same as we have, and nothing beside it."""
    try:
        info = bounded_json.loads(said)
        data = info.get("format-specific", {}).get("data", {})
        whole = info["format"] == answer.format and info["virtual-size"] == answer.virtual_size
    except (ValueError, KeyError, AttributeError):
        raise FailedPrecondition(f"image {what}: qemu-img can't tell what its disk is") from None
    beside = [key for key in ("backing-filename", "full-backing-filename", "encrypted") if info.get(key)]
    if not whole or beside or data.get("data-file") or data.get("corrupt"):
        raise FailedPrecondition(
            f"image {what}: qemu-img reads its disk as something else; "
            "convert it anew, by `qemu-img convert -O qcow2`"
        )


def _words(output: Output) -> str:
    said = (output.stderr or output.stdout).decode(errors="replace").strip()
    shown = "".join(c if c.isprintable() else " " for c in redacted_end(said, _MOST_WORDS))
    return shown.strip() or output.how


def _unreadable(output: Output, what: str) -> InfranetesError:
    return FailedPrecondition(
        f"image {what}: its qcow2 disk is corrupt or truncated, as qemu-img {output.how}: {_words(output)}; "
        "build the image again, or repair the disk by `qemu-img check -r all`"
    )


def _failure(output: Output, what: str) -> InfranetesError:
    if output.code == BAD:
        return FailedPrecondition(f"image {what} can't be booted: {_words(output)}")
    if output.code == FULL:
        return ResourceExhausted(f"there is no room for the disk of image {what}; remove images or make room")
    return InfranetesError(f"the program that reads the disk of image {what} {output.how}: {_words(output)}")
