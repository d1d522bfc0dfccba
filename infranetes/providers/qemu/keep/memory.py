# SPDX-License-Identifier: Apache-2.0
"""The memory that a VM shares with other clones, before its content is saved."""

from __future__ import annotations

from collections.abc import Callable

from infranetes.providers.qemu.settings import MIB
from infranetes.providers.qemu.template.ram import thd_fill
from infranetes.providers.qemu.vm.record import VmRecord
from infranetes.providers.qemu.vm.vm import Vm
from infranetes_common.concurrency import KEEPING, run_in_thread
from infranetes_common.errors import FailedPrecondition
from infranetes_common.reactors import IReactor


async def fill_memory(
    reactor: IReactor, vm: Vm, memory_mib: int, room_of: Callable[[VmRecord], int | None]
) -> None:
    """Fill a VM's memory at the daemon's expense.

    Pages that no clone has ever touched come to exist when QEMU reads them, as the kernel has it for such
    memory. They would count as the pod's, whose limit has no room for them.

    :param room_of: returns the bytes that a VM's pod has left; None: any number. It may block.
    :raise FailedPrecondition: they would."""
    if (memory := vm.ram) is not None:  # had until it is filled, whatever becomes of the VM
        await run_in_thread(reactor, thd_fill, memory.fileno(), purpose=KEEPING)
        return
    room = await run_in_thread(reactor, room_of, vm.record)
    if room is not None and room < memory_mib * MIB:
        raise FailedPrecondition(
            f"VM {vm.record.id} was made by an earlier daemon, and its pod's limit has {room // MIB} MiB "
            f"left: saving its memory may take {memory_mib}. Recreate the pod, or raise its limit"
        )
