# SPDX-License-Identifier: Apache-2.0
"""conmon: a small process beside each container, which holds its streams and outlives the agent.

conmon calls crun to create the container, writes its log, serves attached clients, and in the end writes the
exit code to the file `exit` and ends. So the agent waits for the end of conmon. In a container's bundle:

config.json   the specification for crun
conmon.pid    conmon's pid
first.pid     the pid of the container's first process
attach        a socket: see `vmserver.containers.oci.attach`
ctl, winsz    FIFOs: see `vmserver.containers.oci.control`
exit          the exit code, written when everything is read and logged; its time is that of the end
oom           made when memory ran out
killed        made by the agent before it kills the container

Sources: containers/conmon src/conmon.c, src/cli.c, src/ctr_exit.c; cri-o/cri-o internal/oci/runtime_oci.go.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import attrs
from twisted.internet.interfaces import IDelayedCall
from twisted.logger import Logger

from infranetes_common.commands import find_program
from infranetes_common.concurrency import backoff, run_in_thread, sleep, until_ended, within
from infranetes_common.errors import DeadlineExceeded, InvalidArgument, Unavailable
from infranetes_common.processes import ProcessEnd, start_ticks
from infranetes_common.reactors import IReactor
from vmserver.containers.oci import cgroup
from vmserver.containers.oci.launch import ConmonLaunch
from vmserver.containers.oci.runtime import REMEDY, Crun

CREATE_SECONDS = 60.0  # for crun to create a container; it takes 0.4 s under emulation
LAST_SECONDS = 30.0  # for conmon to read and log the remaining output after its container's end
CGROUP = "infranetes.conmon"
"""The parent of every conmon's own cgroup, apart from the agent's and the containers' cgroups."""

KILLED_CODE = 128 + signal.SIGKILL
LOST_CODE = KILLED_CODE  # the exit code recorded when the real one is unknown
_WRITABLE = 0o622  # nobody reads what a container has written but conmon
_DECORATION = re.compile(r"\A\x1b\[[0-9;]*m[-0-9T:.]*Z: ")  # crun writes in red to a terminal
# Messages of newer releases of crun. Earlier ones fail when they open or execute the file.
_UNFIT = re.compile("the path `.*` (?:exists but it is not executable|is not a regular file)")
_MADE = ("conmon.pid", "first.pid", "attach", "ctl", "winsz", "exit", "oom", "killed")

_log = Logger()


class CannotRun(InvalidArgument):
    """crun can't create the container.

    :ivar exit_code: 127: there is no such command; 126: it can't be executed; 128: anything else.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def exit_code_of(message: str) -> int:
    """Return 127, 126 or 128 for crun's message about a container or command that it can't run."""
    message = _DECORATION.sub("", message)
    if message.startswith("executable file ") and "not found" in message:
        return 127
    return 126 if message.startswith(("open executable", "exec")) or _UNFIT.match(message) else 128


@attrs.frozen
class Monitored:
    """The description of a container for conmon.

    :ivar bundle: a directory with config.json, of this container alone.
    :ivar log: the file for its output, in the CRI's format.
    :ivar stdin: True if it has a stdin, without a terminal. :ivar stdin_once: True if its stdin ends with
        the first attached client.
    """

    id: str
    bundle: Path
    log: Path
    terminal: bool = False
    stdin: bool = False
    stdin_once: bool = False


@attrs.frozen
class Process:
    """A container's first process, and its conmon; each with its `start_ticks`."""

    pid: int
    ticks: int
    conmon: int
    conmon_ticks: int


@attrs.frozen
class Exit:
    """The end of a container.

    :ivar finished_at: nanoseconds since 1970. :ivar oom_killed: True if its first process was killed, not by
        the agent, and the kernel has killed one of its processes because memory ran out.
    :ivar message: the error if its conmon failed; else empty.
    """

    code: int
    finished_at: int
    oom_killed: bool
    message: str = ""


class Conmon:
    """Starts, watches and finds conmons.

    :param program: name or path. :param group: the cgroup of all conmons. :param seconds: the time that
        crun gets to create a container.
    """

    def __init__(
        self,
        reactor: IReactor,
        crun: Crun,
        program: str = "conmon",
        *,
        group: str = CGROUP,
        seconds: float = CREATE_SECONDS,
    ) -> None:
        self._reactor = reactor
        self._crun = crun
        self._program = program
        self._group = group
        self._seconds = seconds

    async def create(self, container: Monitored) -> Process:
        """Create a container under a conmon of its own, without starting it: see `Crun.start`.

        :raise CannotRun: crun refuses it.
        :raise FailedPrecondition: a program is not installed. :raise Unavailable: one of them failed.
        After an error nothing but the bundle and the log remains.
        """
        command = self._command(container)
        await run_in_thread(self._reactor, _unlink, container)
        launch = ConmonLaunch(self._reactor, command, container.bundle, self._cgroup(container))
        try:
            pid, message = await within(self._reactor, self._seconds, launch.result, "creating the container")
            if pid <= 0:
                raise CannotRun(message, exit_code_of(message))
            process = self._process(container, pid)
            if process is None:
                # The one that was started writes down the pid of the one that it forked, which may be faster.
                await within(self._reactor, self._seconds, launch.exited.wait(), "creating the container")
                process = self._process(container, pid)
            if process is None:
                raise Unavailable("conmon ended while it created the container")
            if not container.terminal:
                _open_output(process.pid)
        except BaseException as error:
            launch.kill()
            await until_ended(launch.going)
            await self.discard(container)
            if isinstance(error, DeadlineExceeded):
                raise Unavailable(
                    f"container {container.id}: conmon and crun did not create it in {self._seconds:g} s and "
                    f"were killed; try again, and if that goes on look at the VM's disk and memory"
                ) from None
            raise
        finally:
            launch.close()
        return process

    def find(self, container: Monitored) -> Process | Exit | None:
        """Return the process or exit of a container that an earlier agent created; None if there is neither.

        A container whose conmon is gone is killed."""
        status = self._crun.status(container.id)
        process = None if status is None else self._process(container, status.pid)
        if process is not None:
            return process
        if status is None and not (container.bundle / "exit").exists():
            return None
        return self._outcome(container)

    def watch(self, container: Monitored, process: Process, ended: Callable[[Exit], None]) -> Watch:
        """Call `ended` once, later, when a container has ended."""
        return Watch(self._reactor, process, lambda: self._outcome(container), ended)

    async def kill(self, container: Monitored) -> None:
        """SIGKILL all processes of a container, which is then not told to have ended for want of memory."""
        status = self._crun.status(container.id)
        if status is not None:
            if status.alive:
                with contextlib.suppress(OSError):  # a full disk must not prevent it
                    (container.bundle / "killed").touch()
            await run_in_thread(self._reactor, status.kill)

    async def discard(self, container: Monitored) -> None:
        """Kill a container and its conmon, and delete their files in the bundle. Idempotent.

        A watch reports this as the container's end: close it first.

        :raise Unavailable: crun can't delete it."""
        await self._clear(self._cgroup(container))  # kills a crun that is still creating the container, too
        status = self._crun.status(container.id)
        if status is not None:
            await run_in_thread(self._reactor, status.kill)
        elif path := _configured_cgroup(container):
            await self._clear(path)  # crun was killed before it recorded the cgroup that it had made
        await self._crun.delete(container.id)
        await run_in_thread(self._reactor, _unlink, container)

    async def _clear(self, path: str) -> None:
        """Kill all processes in a cgroup, and remove it."""
        for pause in itertools.islice(backoff(0.005, 0.1), 20):
            # In a thread, since the kernel may be slow to remove a cgroup.
            if await run_in_thread(self._reactor, _thd_clear, path):
                return
            await sleep(self._reactor, pause)
        _log.warn("the processes in the cgroup {path} do not end", path=path)

    def _cgroup(self, container: Monitored) -> str:
        return f"{self._group}/{container.id}"

    def _command(self, container: Monitored) -> list[str]:
        if ":" in str(container.log):
            raise InvalidArgument(f"the log's path {container.log} has a colon, which conmon can't read")
        bundle = container.bundle
        command = [
            find_program(self._program, REMEDY),
            f"--cid={container.id}",
            f"--cuuid={container.id}",
            f"--bundle={bundle}",
            f"--conmon-pidfile={bundle / 'conmon.pid'}",
            f"--container-pidfile={bundle / 'first.pid'}",
            f"--persist-dir={bundle}",
            "--full-attach",
            "--no-sync-log",
            f"--log-path=k8s-file:{container.log}",
            "--log-level=error",
            f"--runtime={self._crun.command()[0]}",
            f"--runtime-arg=--root={self._crun.root}",
        ]
        if container.terminal:
            command.append("--terminal")
        elif container.stdin:
            command.append("--stdin")
            if not container.stdin_once:
                command.append("--leave-stdin-open")
        return command

    def _process(self, container: Monitored, pid: int) -> Process | None:
        """Return the process, if its conmon is there."""
        conmon = _conmon_pid(container)
        ticks = start_ticks(conmon)
        return Process(pid, start_ticks(pid), conmon, ticks) if ticks else None

    def _outcome(self, container: Monitored) -> Exit:
        """Return how a container has ended; kill it if its conmon did not see its end."""
        status = self._crun.status(container.id)
        kills = None if status is None or status.cgroup is None else status.cgroup.oom_kills()
        oom = (container.bundle / "oom").exists() if kills is None else kills > 0
        oom = oom and not (container.bundle / "killed").exists()
        file = container.bundle / "exit"
        try:
            code = int(file.read_text())
            return Exit(code, file.stat().st_mtime_ns, oom and code == KILLED_CODE)
        except (OSError, ValueError):
            pass
        if status is not None:
            status.kill()
        message = (
            "conmon, which runs the container, ended before it; what was left of the container was killed"
        )
        _log.warn("container {id}: {message}", id=container.id, message=message)
        return Exit(LOST_CODE, time.time_ns(), oom, message)


class Watch:
    """Waits for the end of a container, until closed."""

    def __init__(
        self,
        reactor: IReactor,
        process: Process,
        outcome: Callable[[], Exit],
        ended: Callable[[Exit], None],
    ) -> None:
        self._reactor = reactor
        self._process = process
        self._outcome = outcome
        self._ended = ended
        self._timer: IDelayedCall | None = None
        self._ends: list[ProcessEnd] = []
        self._open = True
        self._look(process.conmon, process.conmon_ticks, self._over)
        self._look(process.pid, process.ticks, self._wait_for_conmon)

    def _look(self, pid: int, ticks: int, then: Callable[[], None]) -> None:
        with contextlib.suppress(ProcessLookupError):
            end = ProcessEnd(self._reactor, pid, then)
            if start_ticks(pid) == ticks:
                self._ends.append(end)
                return
            end.close()
        self._reactor.callLater(0, then)

    def _wait_for_conmon(self) -> None:
        if self._open:
            self._timer = self._reactor.callLater(LAST_SECONDS, self._give_up)

    def _give_up(self) -> None:
        """Kill a conmon that hangs; its end is noticed like any other."""
        _log.warn("conmon {pid} did not end after its container, and is killed", pid=self._process.conmon)
        if start_ticks(self._process.conmon) == self._process.conmon_ticks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.conmon, signal.SIGKILL)

    def _over(self) -> None:
        if self._open:
            self.close()
            self._ended(self._outcome())

    def close(self) -> None:
        """Stop waiting. Idempotent."""
        self._open = False
        if self._timer is not None and self._timer.active():
            self._timer.cancel()
        for end in self._ends:
            end.close()


def _open_output(pid: int) -> None:
    """Let all users of a container write to its output by the names /dev/stdout and /dev/stderr.

    crun gives the pipes to the user that the container begins with; many images begin as root and drop it."""
    for stream in (1, 2):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            os.chmod(f"/proc/{pid}/fd/{stream}", _WRITABLE)


def _conmon_pid(container: Monitored) -> int:
    """Return the pid of a container's conmon; 0 if it does not run."""
    with contextlib.suppress(OSError, ValueError):
        pid = int((container.bundle / "conmon.pid").read_text())
        if f"--cid={container.id}".encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
            return pid
    return 0


def _configured_cgroup(container: Monitored) -> str:
    """Return the path of the container's cgroup; empty: it has none of its own."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        path = json.loads((container.bundle / "config.json").read_text())["linux"]["cgroupsPath"]
        cgroup.Cgroup(path)
        return str(path)
    return ""


def _unlink(container: Monitored) -> None:
    for name in _MADE:
        (container.bundle / name).unlink(missing_ok=True)


def _thd_clear(path: str) -> bool:
    """Kill the processes in a cgroup, and remove it; return whether it is gone."""
    group = cgroup.Cgroup(path)
    group.kill()
    cgroup.remove(path)
    return not group.exists
