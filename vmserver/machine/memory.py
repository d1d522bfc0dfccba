# SPDX-License-Identifier: Apache-2.0
"""The machine's pluggable memory: taken out of use before the hypervisor unplugs it, or into use again.

The kernel takes a block out of use by moving its content elsewhere. It tries until it succeeds or the process
that asked gets a signal; therefore a child process asks, which can be killed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import attrs
from twisted.internet.defer import DeferredLock
from twisted.internet.interfaces import IDelayedCall
from twisted.logger import Logger

from infranetes_common.commands import Command, run
from infranetes_common.concurrency import start, to_its_end
from infranetes_common.errors import FailedPrecondition, InfranetesError, InvalidArgument
from infranetes_common.reactors import IReactor

BLOCKS = Path("/sys/devices/system/memory")
MEMINFO = Path("/proc/meminfo")
MOST_BLOCKS = 1024  # per call: 128 GiB in blocks of 128 MiB
RESERVE = 64 << 20  # bytes that stay available to running processes
RESTORE_SECONDS = 60.0
OFFLINE, ONLINE = "offline", "online"
_SCRIPT = 'state=$1; shift; for block; do echo "$state" >"$block/state" || exit 1; done'
SET_STATE = ("/bin/sh", "-c", _SCRIPT, "sh")
_AVAILABLE = re.compile(r"^MemAvailable: +(\d+) kB$", re.MULTILINE)
_MIB = 1 << 20
_log = Logger()


@attrs.frozen
class Range:
    """A part of the memory, by its physical address, in bytes."""

    address: int
    size: int


class MachineMemory:
    """The machine's blocks of memory. Calls are served one after the other.

    :param blocks: the kernel's directory of blocks. :param meminfo: its file with the memory's figures.
    :param set_state: a command that sets the state of blocks, given the state and their directories.
    """

    def __init__(
        self,
        reactor: IReactor,
        blocks: Path = BLOCKS,
        meminfo: Path = MEMINFO,
        set_state: Sequence[str] = SET_STATE,
    ) -> None:
        self._reactor = reactor
        self._blocks = blocks
        self._meminfo = meminfo
        self._set_state = set_state
        self._lock = DeferredLock()
        self._released: set[Path] = set()
        self._return: IDelayedCall | None = None

    def begin(self) -> None:
        """Bring memory online again that an earlier agent left offline."""
        self._released |= {block for block in self._blocks.glob("memory[0-9]*") if _state(block) == OFFLINE}
        if self._released:
            self._take_back()

    async def release(self, ranges: Sequence[Range], seconds: float) -> None:
        """Take all of this memory offline, or none; bring back what is left after `seconds`. Idempotent.

        :raise InvalidArgument: these ranges can't be taken offline.
        :raise FailedPrecondition: processes need it, or the kernel can't move its content.
        :raise DeadlineExceeded: it takes longer than `seconds`.
        """
        async with self._lock:
            blocks = self._found(ranges)
            self._forget_return()
            self._released |= {*blocks}
            try:
                await self._release(blocks, seconds)
            except Exception:
                await to_its_end(start(self._restore(blocks)))  # in its turn, whoever cancels
                raise
            finally:
                self._return = self._reactor.callLater(seconds, self._take_back)

    async def restore(self, ranges: Sequence[Range]) -> None:
        """Bring memory online again. Memory that was removed meanwhile is ignored. Idempotent.

        :raise InvalidArgument: as for `release`. :raise InfranetesError: the kernel refuses.
        """
        async with self._lock:
            await self._restore(self._found(ranges, missing=True))

    def stop(self) -> None:
        """Cancel the return of memory after `release`. Idempotent."""
        self._forget_return()

    def _forget_return(self) -> None:
        waiting, self._return = self._return, None
        if waiting is not None and waiting.active():
            waiting.cancel()

    def _take_back(self) -> None:
        """Bring memory online that the hypervisor has not removed: the caller of `release` may be gone."""
        self._return = None
        start(self._restore_all()).addErrback(
            lambda failure: _log.failure(
                "memory that was not removed could not be brought back into use", failure
            )
        )

    async def _restore_all(self) -> None:
        async with self._lock:
            if self._return is None:  # no other `release` has begun meanwhile
                await self._restore([*self._released])

    async def _release(self, blocks: Sequence[Path], seconds: float) -> None:
        used = [block for block in blocks if _state(block) != OFFLINE]
        size, available = len(used) * self._block_bytes(), available_bytes(self._meminfo)
        if used and available < size + RESERVE:
            raise FailedPrecondition(
                f"what is running leaves {available // _MIB} MiB; {size // _MIB} MiB can be taken out of use "
                "where "
                f"{RESERVE // _MIB} MiB more are left"
            )
        await self._set(used, OFFLINE, seconds)

    async def _restore(self, blocks: Sequence[Path]) -> None:
        await self._set([block for block in blocks if _state(block) == OFFLINE], ONLINE, RESTORE_SECONDS)
        self._released -= {*blocks}

    async def _set(self, blocks: Sequence[Path], state: str, seconds: float) -> None:
        if not blocks:
            return
        command = [*self._set_state, state, *map(str, blocks)]
        output = await run(self._reactor, Command(command, seconds))
        wrong = [block.name for block in blocks if _state(block) not in (state, "")]
        if wrong:
            raise FailedPrecondition(
                f"the kernel does not set {', '.join(wrong[:4])} {state}, perhaps because it can't move what "
                "is in it: "
                f"{output.message()[:200]}"
            )

    def _found(self, ranges: Sequence[Range], missing: bool = False) -> Sequence[Path]:
        """Return the blocks of these ranges. :param missing: leave out blocks that do not exist."""
        unit = self._block_bytes()
        numbers: list[int] = []
        for each in ranges:
            first, count = each.address // unit, each.size // unit
            if each.address % unit or each.size % unit or not 0 < count <= MOST_BLOCKS - len(numbers):
                raise InvalidArgument(
                    f"{each.size} bytes of memory at {each.address:#x} are no blocks of {unit}, or too many"
                )
            numbers += range(first, first + count)
        found = [self._blocks / f"memory{number}" for number in sorted({*numbers})]
        there = [block for block in found if block.is_dir()]
        if len(there) < len(found) and not missing:
            where = ", ".join(f"{each.address:#x}" for each in ranges[:4])
            raise InvalidArgument(f"the machine does not have all of the memory at {where}")
        return there

    def _block_bytes(self) -> int:
        try:
            return int((self._blocks / "block_size_bytes").read_text(), 16)
        except (OSError, ValueError) as error:
            raise FailedPrecondition(f"the kernel of this machine gives back no memory: {error}") from None


def available_bytes(meminfo: Path = MEMINFO) -> int:
    """Return the available memory in bytes. :raise InfranetesError: the kernel does not say."""
    found = _AVAILABLE.search(meminfo.read_text())
    if found is None:
        raise InfranetesError(f"{meminfo} does not say how much memory is available")
    return int(found[1]) << 10


def _state(block: Path) -> str:
    """Return online, offline, or going-offline; "" if the block is gone."""
    try:
        return (block / "state").read_text().strip()
    except OSError:
        return ""
