# SPDX-License-Identifier: Apache-2.0
"""Memory that is plugged into VMs that run, in pieces, and taken out of them again.

A piece is taken out as a whole: the guest takes it out of use, then QEMU takes it out of the guest, and its
pages are the node's again. Of one that is larger than what is to go, the rest is plugged in afterwards.

daemon killed              the VM has           the next resize
before the device is out   what it had          takes it out, or leaves it: the guest uses it again by itself
before its memory is freed what it is to have   frees the memory
before the rest is put in  less                 puts it in
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import attrs
from twisted.logger import Logger

from infranetes.providers.interface import IGuest, MemoryRange
from infranetes.providers.qemu.program.qmp import QmpError
from infranetes.providers.qemu.settings import MIB
from infranetes.providers.qemu.vm.connections import VmConnections
from infranetes.providers.qemu.vm.sizes import MEMORY, memory_names
from infranetes_common.concurrency import start, to_its_end
from infranetes_common.errors import FailedPrecondition, InfranetesError

_OBJECTS = "/objects"
_log = Logger()


@attrs.frozen
class Piece:
    """A piece that a VM has."""

    device: str
    memory: str  # the name of its memory object
    address: int  # in the guest
    mib: int

    @property
    def range(self) -> MemoryRange:
        """The piece's address and size in the guest, in bytes."""
        return MemoryRange(self.address, self.mib * MIB)


def read_piece(data: Mapping[str, object]) -> Piece:
    """Read a piece from QEMU's answer. :raise LookupError, ValueError, TypeError: the answer is malformed."""
    return Piece(
        device=str(data["id"]),
        memory=str(data["memdev"]).removeprefix(f"{_OBJECTS}/"),
        address=int(data["addr"]),  # type: ignore[call-overload]  # a number, or TypeError
        mib=int(data["size"]) // MIB,  # type: ignore[call-overload]  # likewise
    )


def choose(pieces: Iterable[Piece], surplus: int) -> tuple[Sequence[Piece], int]:
    """The pieces to take out for a VM to have `surplus` MiB less, and how much is to be plugged in instead.

    Nothing is plugged in if that is possible.
    """
    chosen, staying = [], []
    for piece in sorted(pieces, key=lambda piece: piece.mib, reverse=True):
        if piece.mib <= surplus:
            surplus -= piece.mib
            chosen.append(piece)
        else:
            staying.append(piece)
    if not surplus:
        return chosen, 0
    return [*chosen, staying[-1]], staying[-1].mib - surplus


class PluggedMemory:
    """Adds and takes pieces. :param seconds: that the guest has to take one in, or to give some back."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    async def change(
        self, monitor: VmConnections, pieces: Sequence[Piece], target_mib: int, guest: IGuest | None
    ) -> None:
        """Give a VM `target_mib` MiB in pieces; at least, if there is no guest to ask.

        :raise InfranetesError: it has what it had, as far as QEMU and the guest go along.
        """
        await _forget_unused(monitor, pieces)
        has = sum(piece.mib for piece in pieces)
        if target_mib > has:
            await self._add(monitor, pieces, target_mib - has)
        elif target_mib < has and guest is not None:
            await self._take(monitor, pieces, has - target_mib, guest)

    async def _add(self, monitor: VmConnections, pieces: Iterable[Piece], mib: int) -> None:
        """Plug in one piece, whose names none of `pieces` has."""
        number, devices = 0, {piece.device for piece in pieces}
        while memory_names(number)[0] in devices:
            number += 1
        device, memory = memory_names(number)
        try:
            await monitor.qmp.execute("object-add", qom_type="memory-backend-ram", id=memory, size=mib * MIB)
            await monitor.plug({"driver": "pc-dimm", "id": device, "memdev": memory}, self._seconds)
        except QmpError as error:
            await _forget(monitor, memory)
            raise FailedPrecondition(f"the VM can't be made larger: {error}") from None

    async def _take(
        self, monitor: VmConnections, pieces: Sequence[Piece], surplus: int, guest: IGuest
    ) -> None:
        chosen, instead = choose(pieces, surplus)
        await guest.release([piece.range for piece in chosen], self._seconds)
        gone: list[Piece] = []
        try:
            for piece in chosen:
                await monitor.unplug(piece.device, self._seconds)
                gone.append(piece)
                await _forget(monitor, piece.memory)
            if instead:
                # Only now: the pod's control group may have no room for both at once.
                await self._add(monitor, pieces, instead)
        except Exception as error:
            # In its turn, however often it is cancelled.
            await to_its_end(start(self._put_back(monitor, pieces, chosen, gone, guest)))
            if isinstance(error, QmpError):
                raise FailedPrecondition(f"the VM can't be made smaller: {error}") from None
            raise

    async def _put_back(
        self,
        monitor: VmConnections,
        pieces: Sequence[Piece],
        chosen: Sequence[Piece],
        gone: Sequence[Piece],
        guest: IGuest,
    ) -> None:
        still_there = [piece for piece in chosen if piece not in gone]
        try:
            if still_there:
                await guest.restore([piece.range for piece in still_there])
            if gone:
                await self._add(monitor, pieces, sum(piece.mib for piece in gone))
        except InfranetesError as error:
            _log.error("a VM has less memory than before: {error}", error=str(error))


async def _forget_unused(monitor: VmConnections, pieces: Iterable[Piece]) -> None:
    """Free memory that no device has: of attempts that were cut short."""
    used = {piece.memory for piece in pieces}
    objects = await monitor.qmp.execute("qom-list", path=_OBJECTS)
    for name in [str(entry.get("name")) for entry in objects]:
        if name.startswith(MEMORY) and name not in used:
            await _forget(monitor, name)


async def _forget(monitor: VmConnections, memory: str) -> None:
    try:
        await monitor.qmp.execute("object-del", id=memory)
    except QmpError:
        return  # there is no such object
