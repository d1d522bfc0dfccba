# SPDX-License-Identifier: Apache-2.0
"""Finds the VMs that earlier daemons left."""

from __future__ import annotations

import contextlib
import functools
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

from twisted.logger import Logger

from infranetes.providers.qemu.cgroups.placement import Placement
from infranetes.providers.qemu.host.privileges import QemuUser
from infranetes.providers.qemu.program import process
from infranetes.providers.qemu.vm.paths import ProviderPaths
from infranetes.providers.qemu.vm.record import Phase, VmRecords
from infranetes.providers.qemu.vm.vm import Vm
from infranetes_common.concurrency import run_in_thread
from infranetes_common.errors import InfranetesError
from infranetes_common.reactors import IReactor

_log = Logger()


async def find_vms(
    reactor: IReactor,
    records: VmRecords,
    paths: ProviderPaths,
    user: QemuUser,
    placement: Placement,
    ended: Callable[[Vm], None],
    slept: Callable[[Vm], Awaitable[None]],
) -> dict[str, Vm]:
    """Find every VM with a record, by its token. Removes what is left of others.

    :param ended: called when the process of one ends. :param slept: finds out whether one sleeps.
    """
    opened = await run_in_thread(reactor, records.open)
    processes = await run_in_thread(
        reactor, process.pids_by_argument, [record.process_name for record in opened]
    )
    vms = {record.token: Vm(record, paths.of_vm(record, user)) for record in opened}
    for vm in vms.values():
        for pid in processes.get(vm.record.process_name, ()):
            with contextlib.suppress(ProcessLookupError):
                vm.process = process.WatchedProcess(reactor, pid, functools.partial(ended, vm))
    for vm in vms.values():
        await slept(vm)
        await run_in_thread(reactor, vm.explain_missing_process)
        if vm.record.phase is Phase.READY and vm.process is not None and not vm.asleep:
            await _place(placement, vm, vm.process.pid)
    await run_in_thread(reactor, remove_other_sockets, paths.run, set(vms))
    running = sum(vm.alive for vm in vms.values())
    _log.info("found {count} VMs, {running} of them running", count=len(vms), running=running)
    return vms


async def _place(placement: Placement, vm: Vm, pid: int) -> None:
    """Place a found VM in its control group, which also tells why it ends. It runs in any case."""
    try:
        await placement.place(vm.record, pid)
    except InfranetesError as error:
        _log.warn("VM {vm} may not be accounted to its pod: {error}", vm=vm.record.id, error=error)


def remove_other_sockets(directory: Path, tokens: set[str]) -> None:
    """Remove the sockets of VMs with none of these tokens, and of templates."""
    for path in directory.iterdir():
        if path.name not in tokens:
            shutil.rmtree(path, ignore_errors=True)
