# SPDX-License-Identifier: Apache-2.0
"""crun: start, signal, update and delete the containers that it has created for conmon.

In a VM without KVM each start of a program takes 0.1 to 0.3 s, so crun is run only if there is no other way.
It keeps a directory for each container: `status` names its first process and its cgroup; `exec.fifo` exists
until the container is started, and a byte written to it starts the container. Sources:
containers/crun src/libcrun/status.c, container.c.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path

import attrs
from twisted.internet.interfaces import IReactorTime

from infranetes_common.commands import Command, Output, find_program, run
from infranetes_common.concurrency import backoff, run_in_thread, sleep, start
from infranetes_common.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    Unavailable,
)
from infranetes_common.processes import start_ticks
from infranetes_common.reactors import IReactor
from vmserver.containers.oci.addresses import fixed_addresses
from vmserver.containers.oci.cgroup import Cgroup
from vmserver.containers.oci.read_only import thd_read_only
from vmserver.containers.oci.seccomp_filters import SeccompFilters

CALL_SECONDS = 30.0  # for any call of crun to end; it takes 0.3 s under emulation
REMEDY = "install the packages crun and conmon in this VM's image"
_MAX_STATUS_BYTES = 64 * 1024


@attrs.frozen
class Status:
    """The state of a container as crun has recorded it.

    :ivar ticks: the start time of its first process: see `start_ticks`.
    :ivar waiting: True if it is created and not started yet.
    """

    pid: int
    ticks: int
    cgroup: Cgroup | None
    waiting: bool

    @property
    def alive(self) -> bool:
        """Whether its first process exists. A process that has ended exists until its parent reaps it."""
        return start_ticks(self.pid) == self.ticks

    def signal(self, number: int) -> bool:
        """Send a signal to its first process, and to no other; return whether it was there."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except OSError:
            return False
        try:
            if not self.alive:
                return False
            signal.pidfd_send_signal(descriptor, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(descriptor)
        return True

    def kill(self) -> None:
        """SIGKILL all of its processes."""
        self.signal(signal.SIGKILL)
        if self.cgroup is not None:
            self.cgroup.kill()


class Crun:
    """crun, with its directory of containers.

    :param root: the directory, below /run, which a reboot empties. :param program: name or path.
    :param seconds: the time limit of each call. :ivar filters: those that it has compiled.
    """

    def __init__(
        self, reactor: IReactor, root: Path, program: str = "crun", seconds: float = CALL_SECONDS
    ) -> None:
        self._reactor = reactor
        self._program = program
        self.seconds = seconds
        self.root = root
        self.filters = SeccompFilters(root)

    async def mount(self, at: Path) -> None:
        """Run crun from a read-only mount at `at` from now on: see `vmserver.containers.oci.read_only`."""
        with contextlib.suppress(FailedPrecondition):  # reported once crun is needed
            self._program = await run_in_thread(
                self._reactor, thd_read_only, find_program(self._program, REMEDY), at
            )

    def command(self, *words: str) -> list[str]:
        """Return a command line of crun. :raise FailedPrecondition: it is not installed."""
        return [find_program(self._program, REMEDY), f"--root={self.root}", *words]

    def status(self, id: str) -> Status | None:
        """Return crun's record of a container; None if there is none."""
        directory = self.root / id
        try:
            with open(directory / "status", "rb") as file:
                said = json.loads(file.read(_MAX_STATUS_BYTES))
            pid, ticks, path = int(said["pid"]), int(said["process-start-time"]), str(said["cgroup-path"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise Unavailable(f"crun's record {directory / 'status'} can't be read: {error}") from None
        cgroup = Cgroup(path) if path.strip("/") else None
        return Status(pid, ticks, cgroup, (directory / "exec.fifo").exists())

    async def run(self, id: str, bundle: Path) -> str:
        """Create and start a container that has no conmon. Return crun's message if it fails.

        :param bundle: has its config.json and its root file system."""
        command = self.command("run", "--detach", "--bundle", str(bundle), id)
        output = os.memfd_create("crun")  # not a pipe, which the container would keep open
        try:
            with fixed_addresses():
                running = start(self._ended(Command(command, self.seconds, output=output)))
            ended = await running
            said = os.pread(output, _MAX_STATUS_BYTES, 0)
        finally:
            os.close(output)
        return said.decode(errors="replace").strip() if ended.code else ""

    async def start(self, id: str) -> None:
        """Start a created container.

        :raise NotFound: there is none. :raise FailedPrecondition: it is started already, or has ended.
        :raise Unavailable: it does not start.
        """
        status = self.status(id)
        if status is None:
            raise NotFound(f"crun has no container {id}")
        if not status.alive:
            raise FailedPrecondition(f"container {id} has ended before it was started")
        if status.waiting:
            await self._release(id, status)
            return
        # This crun keeps its FIFO elsewhere, as later releases do; or the container runs already, which crun
        # reports.
        ended = await self._run("start", id)
        if ended.code:
            raise FailedPrecondition(f"container {id} can't be started: {ended.message()}")

    async def _release(self, id: str, status: Status) -> None:
        """Let the container's first process go on: as `crun start` does, without its process."""
        fifo = self.root / id / "exec.fifo"
        descriptor = await _opened(self._reactor, fifo, self.seconds)
        try:
            fifo.unlink(missing_ok=True)
            os.write(descriptor, b"\0")
        except BrokenPipeError:
            raise Unavailable(f"container {id} has ended while it was started") from None
        finally:
            os.close(descriptor)

    async def update(self, id: str, resources: Mapping[str, object]) -> None:
        """Change a container's limits.

        :param resources: OCI runtime-spec, `linux.resources`.
        :raise InvalidArgument: crun or the kernel refuses them."""
        ended = await self._run(
            "update", "--resources=/proc/self/fd/0", id, input=json.dumps(resources).encode()
        )
        if ended.code:
            raise InvalidArgument(f"resources of container {id}: {ended.message()}")

    async def delete(self, id: str) -> None:
        """Kill a container's processes and remove its cgroup. Does nothing if there is none.

        :raise Unavailable: crun can't."""
        directory = self.root / id
        if (directory / "status").exists():
            ended = await self._run("delete", "--force", id)
            if ended.code and (directory / "status").exists():
                raise Unavailable(f"container {id} can't be deleted: {ended.message()}")
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(directory)  # crun was killed before it wrote its status; removes a file or two

    async def _run(self, *words: str, input: bytes = b"") -> Output:
        return await self._ended(Command(self.command(*words), self.seconds, input))

    async def _ended(self, command: Command) -> Output:
        try:
            return await run(self._reactor, command)
        except DeadlineExceeded as error:
            raise Unavailable(
                f"{error}; try again, and if that goes on look at the VM's disk and memory"
            ) from None


async def _opened(clock: IReactorTime, fifo: Path, seconds: float) -> int:
    """Open a FIFO for writing, once it has a reader.

    :raise FailedPrecondition: it is gone. :raise Unavailable: it has no reader."""
    waited = 0.0
    for pause in backoff(0.005, 0.1):
        try:
            return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            raise FailedPrecondition(f"container {fifo.parent.name} has been started already") from None
        except OSError as error:
            if error.errno != errno.ENXIO or waited > seconds:
                raise Unavailable(
                    f"container {fifo.parent.name} does not start: {error.strerror}; remove it"
                ) from None
        await sleep(clock, pause)
        waited += pause
    raise AssertionError("unreachable")
