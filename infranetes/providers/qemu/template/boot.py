# SPDX-License-Identifier: Apache-2.0
"""The one boot of a template: until its agent asks for an identity, then its state is saved."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from infranetes.providers.qemu.host.privileges import QemuUser, unprivileged
from infranetes.providers.qemu.network.bridge import open_tap
from infranetes.providers.qemu.program.command_line import LINK, Fd
from infranetes.providers.qemu.program.open_files import OpenFiles, open_files
from infranetes.providers.qemu.program.process import WatchedProcess, spawn
from infranetes.providers.qemu.program.sockets import AGENT, IDENTITY, QMP, connect
from infranetes.providers.qemu.settings import MIB, QemuSettings
from infranetes.providers.qemu.template.save import save_state
from infranetes.providers.qemu.template.template import DISK, OVERLAY, RAM, STATE, Template
from infranetes.providers.qemu.vm.consoles import tail
from infranetes.providers.qemu.vm.record import CONSOLE, OUTPUT
from infranetes_common.commands import Command, check, find_program
from infranetes_common.concurrency import Event, run_in_thread, sleep
from infranetes_common.errors import DeadlineExceeded, FailedPrecondition, InfranetesError, Unavailable
from infranetes_common.reactors import IReactor

if TYPE_CHECKING:
    from infranetes.providers.interface import Progress

# A guest has finished booting once it uses less than this share of a processor for so many seconds.
_IDLE_SECONDS, _IDLE_SHARE = 2.0, 0.15
_SETTLE_SECONDS = 30.0


@attrs.frozen
class TemplateBoot:
    """The boot of a template, in the directory `work`.

    :ivar sockets: the directory for QEMU's sockets.
    :ivar process_name: the argument by which its QEMU is found.
    """

    _reactor: IReactor
    _settings: QemuSettings
    _template: Template
    _work: Path
    _sockets: Path
    _process_name: str
    _user: QemuUser
    _progress: Progress

    async def run(self) -> None:
        """Boot, save the state, end QEMU.

        :raise InfranetesError: a step failed; the message has the end of QEMU's output or of the console.
        """
        process: WatchedProcess | None = None
        try:
            await self._make_disk()
            process = await self._start()
            await self._save_once_booted(process)
        except (InfranetesError, OSError) as error:
            last = tail(self._work / OUTPUT) or tail(self._work / CONSOLE)
            quoted = f"; the machine's last words: {last}" if last else ""
            kind = type(error) if isinstance(error, InfranetesError) else Unavailable
            raise kind(f"the template could not be made: {error}{quoted}") from error
        finally:
            if process is not None:
                await process.kill().addTimeout(10.0, self._reactor)

    async def _make_disk(self) -> None:
        size = self._template.command_line.disk_mib * MIB
        least = self._template.image.disk.stat().st_size
        if size < least:
            raise FailedPrecondition(
                f"providers.qemu.disk is {size // MIB} MiB, the guest image's disk has {least // MIB} MiB: "
                "give at least that"
            )
        layers = ((DISK, "raw", str(self._template.image.disk)), (OVERLAY, "qcow2", DISK))
        for name, backing_format, backing in layers:
            options = ["-q", "-f", "qcow2", "-F", backing_format, "-b", backing]
            command = [self._settings.qemu_img, "create", *options, str(self._work / name), str(size)]
            await check(self._reactor, Command(command, 60.0))

    async def _start(self) -> WatchedProcess:
        command_line = self._template.command_line
        async with open_files(self._reactor) as files:
            await run_in_thread(self._reactor, self._thd_open, files)
            command = [find_program(self._settings.qemu), "-name", self._process_name]
            command += command_line.template_arguments()
            child = spawn(
                self._reactor, unprivileged(command, self._user, dies_with_parent=True), files.by_number()
            )
        return WatchedProcess(self._reactor, child.pid, lambda: None, child)

    def _thd_open(self, files: OpenFiles) -> None:
        for name in (RAM, DISK, CONSOLE):
            (self._work / name).touch(0o600)
            os.chown(self._work / name, self._user.uid, self._user.gid)
        os.truncate(self._work / RAM, self._template.command_line.memory_mib * MIB)
        files.set_standard_streams(self._work / OUTPUT)
        files.open(Fd.RAM, self._work / RAM, os.O_RDWR)
        files.open(Fd.DISK, self._work / DISK, os.O_RDWR)
        files.open(Fd.CONSOLE, self._work / CONSOLE, os.O_RDWR)
        self._template.open_for_boot(files, self._work)
        files.add(Fd.TAP, open_tap(f"inft{os.getpid()}"))
        files.listen(Fd.QMP, self._sockets / QMP)
        files.listen(Fd.IDENTITY, self._sockets / IDENTITY)
        files.listen(Fd.AGENT, self._sockets / AGENT)

    async def _save_once_booted(self, process: WatchedProcess) -> None:
        qmp, port = await connect(self._reactor, self._sockets)
        try:
            await qmp.execute("cont", 60.0)
            await self._booted(port.waiting)
            await self._idle(process.pid)
            self._progress("keeping the template's state")
            await qmp.execute("set_link", name=LINK, up=False)
            await qmp.execute("stop")
            await save_state(self._reactor, qmp, self._work / STATE)
            await qmp.execute("quit")
        finally:
            qmp.close()
            port.close()

    async def _booted(self, waiting: Event[None]) -> None:
        """Wait until the agent asks for its identity."""
        started = self._reactor.seconds()
        timeout = self._settings.template_timeout
        while not waiting.happened:
            seconds = self._reactor.seconds() - started
            if seconds > timeout:
                raise DeadlineExceeded(f"its agent did not ask for an identity in {timeout:g} s")
            if int(seconds) % 10 == 0:
                self._progress(
                    f"booting the template, once for all pods ({seconds:.0f} s; one to three minutes)"
                )
            await sleep(self._reactor, 1.0)
        await waiting.wait()

    async def _idle(self, pid: int) -> None:
        """Wait until the guest is idle, for a bounded time."""
        deadline = self._reactor.seconds() + _SETTLE_SECONDS
        ticks = os.sysconf("SC_CLK_TCK") * _IDLE_SECONDS
        while self._reactor.seconds() < deadline:
            before = _processor_ticks(pid)
            await sleep(self._reactor, _IDLE_SECONDS)
            if (_processor_ticks(pid) - before) / ticks < _IDLE_SHARE:
                return


def _processor_ticks(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        raise Unavailable("QEMU ended") from None
    return int(fields[11]) + int(fields[12])
