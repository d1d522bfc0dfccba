# SPDX-License-Identifier: Apache-2.0
"""The machine's huge pages: as many as containers' limits allow them, from before their creation until they
have ended.

The provider knows the containers and their limits, so a restarted agent counts the same. A guest system may
have reserved pages of its own. Their number is recorded in run_dir before the first page is added: a reboot
empties that directory and resets the kernel's numbers.

file in `base`    the kernel reserves                     next
none              the guest's own                         a container asks for some: the file is written
there             between the guest's own and more        the number is set: the guest's own, and what
                                                          containers that have not ended ask for
there             the guest's own; nobody asks for more   the file is removed

Pages that are used by files of an ended container stay in use: the kernel keeps them beyond its number.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import attrs
from twisted.internet.defer import DeferredLock
from twisted.logger import Logger

from infranetes_common.commands import Command, run
from infranetes_common.concurrency import replace_file, run_in_thread, shielded, start
from infranetes_common.errors import FailedPrecondition, InfranetesError, ResourceExhausted
from infranetes_common.huge_pages import pages_of, resource_name
from infranetes_common.reactors import IReactor
from infranetes_common.wire import cri
from infranetes_common.wire import vmserver as messages
from vmserver.machine.memory import MEMINFO, RESERVE, available_bytes

SIZES = Path("/sys/kernel/mm/hugepages")
SET_SECONDS = 30.0  # for the kernel to find contiguous memory
SET_NUMBER = ("/bin/sh", "-c", 'echo "$1" >"$2/nr_hugepages"', "sh")
_DIRECTORY = re.compile(r"hugepages-([0-9]{1,12})kB")
_MIB = 1 << 20

Containers = Callable[[], Awaitable[Sequence[messages.ContainerState]]]

_log = Logger()


def huge_page_sizes(sizes: Path = SIZES) -> list[int]:
    """Return the sizes that the kernel can reserve, in bytes. Blocks for less than a millisecond."""
    try:
        found = [_DIRECTORY.fullmatch(one.name) for one in sizes.iterdir()]
    except OSError:
        return []
    return sorted(int(one[1]) << 10 for one in found if one)


def check_size(size: int, sizes: Sequence[int]) -> None:
    """Check that `size` is one of `sizes`. :raise FailedPrecondition: it is not."""
    if size not in sizes:
        there = ", ".join(map(resource_name, sizes)) or "none"
        raise FailedPrecondition(
            f"this VM can't have {resource_name(size)}: its processor and kernel have {there}"
        )


@attrs.frozen
class _Number:
    """The number of pages of one size. :ivar own: the guest's own pages; None if they aren't recorded."""

    own: int | None
    reserved: int
    surplus: int


class HugePages:
    """Reserves pages, one operation at a time.

    :param containers: lists the provider's containers.
    :param base: a directory for its files, which it creates.
    :param sizes: the kernel's directory of sizes. :param meminfo: the kernel's file about memory.
    :param set_number: a command that sets a number, given the number and the size's directory.
    """

    def __init__(
        self,
        reactor: IReactor,
        containers: Containers,
        base: Path,
        sizes: Path = SIZES,
        meminfo: Path = MEMINFO,
        set_number: Sequence[str] = SET_NUMBER,
    ) -> None:
        self._reactor = reactor
        self._containers = containers
        self._base = base
        self._sizes = sizes
        self._meminfo = meminfo
        self._set_number = set_number
        self._lock = DeferredLock()
        # Containers that are being given limits: their ids, and their numbers of pages by size.
        self._coming: list[tuple[str, Mapping[int, int]]] = []

    @asynccontextmanager
    async def reserved(self, id: str, limits: cri.LinuxContainerResources) -> AsyncIterator[None]:
        """Reserve the pages that `limits` ask for while a container is given these limits.

        :raise FailedPrecondition: the kernel has no pages of that size.
        :raise ResourceExhausted: there is not enough memory for them.
        :raise InfranetesError: the kernel does not reserve that many."""
        coming = (id, pages_of(limits))
        self._coming.append(coming)
        try:
            await self._fit()
            yield
        finally:
            self._coming.remove(coming)
            await shielded(self.settle())

    async def settle(self, *, first: bool = False) -> None:
        """Reserve exactly what the present containers ask for. Failures are only logged.

        :param first: True if the machine may have rebooted since it had containers."""
        try:
            await self._fit(first)
        except (InfranetesError, OSError) as error:
            _log.warn("the number of huge pages does not match what containers ask for: {error}", error=error)

    def begin(self) -> None:
        """Settle the reservations that an earlier agent may have left."""
        start(self.settle(first=True))

    async def _fit(self, first: bool = False) -> None:
        async with self._lock:
            noted = await run_in_thread(self._reactor, self._thd_noted)
            if not (first or noted or any(pages for _, pages in self._coming)):
                return
            needed = await self._needed()
            for size in sorted({*needed, *noted}):
                await self._set(size, needed.get(size, 0))

    async def _needed(self) -> Mapping[int, int]:
        """Return the number of pages that present and coming containers ask for, by page size."""
        of_container: dict[str, dict[int, int]] = {}
        live = [
            (state.id, pages_of(state.resources))
            for state in await self._containers()
            if state.state != cri.CONTAINER_EXITED
        ]
        for id, pages in (*live, *self._coming):
            most = of_container.setdefault(id, {})
            for size, number in pages.items():
                most[size] = max(most.get(size, 0), number)
        needed: dict[int, int] = {}
        for pages in of_container.values():
            for size, number in pages.items():
                needed[size] = needed.get(size, 0) + number
        return needed

    async def _set(self, size: int, pages: int) -> None:
        """Make the kernel reserve `pages` in addition to the guest's own."""
        check_size(size, huge_page_sizes(self._sizes))
        before = await run_in_thread(self._reactor, self._thd_read, size)
        own = before.reserved if before.own is None else before.own
        if before.own is None:
            if not pages:
                return
            await run_in_thread(self._reactor, self._thd_note, size, own)
        wanted = own + pages
        if wanted > before.reserved:
            self._check_room(size, pages, wanted - before.reserved - before.surplus)
        if wanted != before.reserved:
            await self._write(size, wanted)
        if not pages:
            await run_in_thread(self._reactor, self._noted(size).unlink)

    def _check_room(self, size: int, pages: int, more: int) -> None:
        available = available_bytes(self._meminfo)
        if more > 0 and available < more * size + RESERVE:
            raise ResourceExhausted(
                f"this VM has no memory for {pages * size // _MIB} MiB of {resource_name(size)}: what is "
                f"running leaves {available // _MIB} MiB,"
                f" {more * size // _MIB} more are needed for them, and "
                f"{RESERVE // _MIB} have to stay. Give the pod more memory, or fewer huge pages"
            )

    async def _write(self, size: int, wanted: int) -> None:
        directory = self._directory(size)
        output = await run(
            self._reactor, Command([*self._set_number, str(wanted), str(directory)], SET_SECONDS)
        )
        found = await run_in_thread(self._reactor, self._thd_read, size)
        if found.reserved != wanted:
            raise ResourceExhausted(
                f"the kernel of this VM reserves {found.reserved} of {wanted} huge pages "
                f"({resource_name(size)}): it finds no more memory in one piece ({output.message()[:200]}). "
                "Give the pod more memory, or fewer huge pages"
            )

    def _directory(self, size: int) -> Path:
        return self._sizes / f"hugepages-{size >> 10}kB"

    def _noted(self, size: int) -> Path:
        return self._base / f"{size >> 10}kB"

    def _thd_noted(self) -> list[int]:
        return [int(one.name.removesuffix("kB")) << 10 for one in self._base.glob("*kB")]

    def _thd_note(self, size: int, own: int) -> None:
        self._base.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(self._noted(size), f"{own}\n", durable=False)

    def _thd_read(self, size: int) -> _Number:
        directory, noted = self._directory(size), self._noted(size)
        surplus = int((directory / "surplus_hugepages").read_text())
        total = int((directory / "nr_hugepages").read_text())
        own = int(noted.read_text()) if noted.exists() else None
        return _Number(own, total - surplus, surplus)
