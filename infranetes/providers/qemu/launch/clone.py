# SPDX-License-Identifier: Apache-2.0
"""The steps from a record on disk to a clone that executes. `launcher` takes them in this order.

step        what it makes                              undone by
files       directory: record, disk, console           `VmRecords.hide`
process     QEMU, its tap, its sockets                 SIGKILL; the tap goes with the process
network     the tap's port, the right to send          `Bridge.forbid`; the port goes with the tap
disks       (plugged in, if it starts from a kept state that has some)
state       (QEMU loads the template's, or that of a kept VM)
execute
identity    (see `launcher`)
size        (memory and processors are plugged in)
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime

from infranetes.providers.qemu.host.privileges import unprivileged
from infranetes.providers.qemu.keep.state import KeptState
from infranetes.providers.qemu.network.bridge import open_tap
from infranetes.providers.qemu.program.command_line import Fd
from infranetes.providers.qemu.program.memory import Memory
from infranetes.providers.qemu.program.open_files import OpenFiles, open_files
from infranetes.providers.qemu.program.process import WatchedProcess, spawn
from infranetes.providers.qemu.program.sockets import IDENTITY, QMP
from infranetes.providers.qemu.template.template import Template
from infranetes.providers.qemu.vm.connections import VmConnections
from infranetes.providers.qemu.vm.paths import VmPaths
from infranetes.providers.qemu.vm.record import VmRecord
from infranetes_common.commands import find_program
from infranetes_common.concurrency import run_in_thread, start
from infranetes_common.reactors import IReactor

Origin: TypeAlias = Template | KeptState
"""The state that a VM starts from."""


class StepTimer:
    """A timer of the steps, for the log."""

    def __init__(self, clock: IReactorTime) -> None:
        self._clock = clock
        self._began = self._last = clock.seconds()
        self._steps: list[str] = []

    def done(self, step: str) -> None:
        """Note that `step` ends now."""
        now = self._clock.seconds()
        self._steps.append(f"{step} {now - self._last:.3f}")
        self._last = now

    @property
    def seconds(self) -> float:
        """The time of all steps."""
        return self._last - self._began

    def __str__(self) -> str:
        return ", ".join(self._steps)


async def start_process(
    reactor: IReactor,
    origin: Origin,
    ram: Memory,
    record: VmRecord,
    paths: VmPaths,
    ended: Callable[[], None],
) -> WatchedProcess:
    """Start QEMU, which then waits for its state.

    :param ram: the origin's memory.
    :param ended: called once, when the process has ended.
    :raise FailedPrecondition: a program or right is missing.
    :raise OSError: a file can't be opened.
    """
    async with open_files(reactor) as files:
        files.add(Fd.RAM, os.dup(ram.fileno()))
        await run_in_thread(reactor, _thd_open, files, origin, record, paths)
        program = find_program(origin.template.command_line.qemu)
        command = [program, "-name", record.process_name, *origin.clone_arguments()]
        child = spawn(reactor, unprivileged(command, paths.user, dies_with_parent=False), files.by_number())
    return WatchedProcess(reactor, child.pid, ended, child)


def _thd_open(files: OpenFiles, origin: Origin, record: VmRecord, paths: VmPaths) -> None:
    """Open what QEMU is given. A tap waits in the kernel until no other network is being changed."""
    shutil.rmtree(paths.sockets, ignore_errors=True)
    paths.sockets.mkdir(mode=0o700)
    origin.open_for_clone(files)
    files.set_standard_streams(paths.output)
    files.open(Fd.DISK, paths.disk, os.O_RDWR)
    files.open(Fd.CONSOLE, paths.console, os.O_RDWR)
    files.listen(Fd.QMP, paths.sockets / QMP)
    files.listen(Fd.IDENTITY, paths.sockets / IDENTITY)
    files.listen(Fd.AGENT, paths.agent_port)
    files.add(Fd.TAP, open_tap(record.tap))


async def execute(
    connections: VmConnections,
    joining: Deferred[None],
    loaded: Callable[[], Awaitable[None]],
    seconds: float,
    steps: StepTimer,
) -> None:
    """Load its state and let the clone execute.

    :param joining: fires when the tap is a port of the bridge.
    :param loaded: called when the clone has its state, and does not execute yet.
    :raise InfranetesError: a step failed.
    """
    loading = start(connections.load_state(seconds))
    try:
        await joining
    except BaseException:
        loading.addErrback(lambda failure: None)
        raise
    await loading
    steps.done("state")
    await loaded()
    await connections.resume()
    steps.done("execute")
