# SPDX-License-Identifier: Apache-2.0
"""A command in a running container: `crun exec` as a child of the agent.

crun reads the command from a pipe, so that arguments and variables, which may be secret, are neither in a
file nor in a list of processes. It begins only once the agent has given it the container's oom_score_adj,
which the command inherits. With cgroup v2 each command is in a cgroup of its own below the container's and is
killed together with all its descendants.

A command may take as long as it likes, but crun may not: a crun that has no child after some time hangs, and
is killed.

crun ends once it has no children left. In a container with the VM's own PID namespace it also inherits the
processes that a command leaves behind: these are killed, or else the command would never end. Source:
containers/crun src/exec.c, src/libcrun/container.c.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import signal
from collections.abc import Mapping
from pathlib import Path

from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.internet.process import Process
from twisted.internet.protocol import ProcessProtocol

from infranetes_common.commands import ENVIRONMENT
from infranetes_common.errors import Unavailable
from infranetes_common.processes import family, kill_family, start_ticks
from infranetes_common.reactors import IReactor
from infranetes_common.spawning import spawn
from vmserver.containers.oci.addresses import fixed_addresses
from vmserver.containers.oci.cgroup import COMMAND
from vmserver.containers.oci.conmon import exit_code_of
from vmserver.containers.oci.runtime import Crun, Status

_SPECIFICATION = 3  # the descriptor from which crun reads what to execute
_REFUSED = (1, 255)  # crun's own exit codes
_MAX_MESSAGE_BYTES = 1024


class CommandGroups:
    """The cgroups of commands that have ended.

    The kernel keeps a cgroup for as long as a killed process in it is exiting. Such a cgroup is removed when
    another command has ended, or with its container.
    """

    AT_ONCE = 32

    def __init__(self) -> None:
        self._left: dict[Path, None] = {}  # in the order of the next attempts

    def remove(self, group: Path) -> None:
        """Remove a cgroup, and retry some earlier failures. A cgroup with running processes stays."""
        for each in [group, *itertools.islice(self._left, self.AT_ONCE)]:
            self._left.pop(each, None)
            try:
                each.rmdir()
            except FileNotFoundError:
                continue
            except OSError:
                self._left[each] = None


class ExecLaunch:
    """One run of `crun exec`.

    :param groups: removes its cgroup. :param drain: see `FirstProcess`.
    :ivar failure: set if crun itself has failed.
    """

    def __init__(
        self,
        reactor: IReactor,
        crun: Crun,
        id: str,
        status: Status,
        specification: bytes,
        oom_score_adj: int,
        directory: Path,
        groups: CommandGroups,
        drain: float,
    ) -> None:
        self._reactor = reactor
        self._crun = crun
        self._groups = groups
        self._id = id
        self._first: FirstProcess | None = None
        if _same_processes(status.pid):
            self._first = FirstProcess(reactor, directory / f"{secrets.token_hex(6)}.pid", drain)
        self._specification = specification
        self._score = oom_score_adj
        self._pid = 0
        self._message = bytearray()
        self._hanging: IDelayedCall | None = None
        self.failure: Unavailable | None = None
        self._group: Path | None = None
        unified = None if status.cgroup is None else status.cgroup.unified
        if unified is not None:
            self._group = unified / f"{COMMAND}{secrets.token_hex(6)}"

    def spawn(
        self, protocol: ProcessProtocol, descriptors: Mapping[int, str | None], console: Path | None = None
    ) -> None:
        """Start crun. :param descriptors: as `spawnProcess` takes them; None is /dev/null."""
        words = [f"--process=/proc/self/fd/{_SPECIFICATION}"]
        if console is not None:
            words.append(f"--console-socket={console}")
        if self._first is not None:
            words.append(f"--pid-file={self._first.path}")
        if self._group is not None:
            self._group.mkdir()
            words.append(f"--cgroup={self._group.name}")
        command = self._crun.command("exec", *words, self._id)
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        try:
            files: dict[int, str | int] = {fd: null if to is None else to for fd, to in descriptors.items()}
            with fixed_addresses():
                spawn(self._reactor, protocol, command, ENVIRONMENT, "/", {**files, _SPECIFICATION: "w"})
        except BaseException:
            self.over()
            raise
        finally:
            os.close(null)

    def began(self, transport: Process) -> None:
        """Let crun go on. Called in `connectionMade`."""
        self._pid = transport.pid or 0
        self._hanging = self._reactor.callLater(self._crun.seconds, self._look)
        if self._first is not None:
            self._first.watch(self._pid)
        with contextlib.suppress(OSError):  # without the right to lower the score, it stays
            Path(f"/proc/{self._pid}/oom_score_adj").write_text(str(self._score))
        transport.writeToChild(_SPECIFICATION, self._specification)
        transport.closeChildFD(_SPECIFICATION)

    def _look(self) -> None:
        """Give up on a crun that has not begun the command."""
        if len(family(self._pid)) == 1:
            self.failure = Unavailable(
                f"crun did not begin the command in container {self._id} within {self._crun.seconds:g} s and "
                "was killed; try again, and if that goes on look at the VM's disk and memory"
            )
            self.kill()

    def kill(self) -> None:
        """Kill the command and whatever it has started."""
        if self._group is not None:
            with contextlib.suppress(OSError):
                (self._group / "cgroup.kill").write_text("1")
        kill_family(self._pid)

    def heard(self, data: bytes) -> None:
        """Look at output of crun or the command, to learn whether it is crun's."""
        self._message += data[: max(0, _MAX_MESSAGE_BYTES - len(self._message))]

    def exit_code(self, code: int) -> int:
        """Return the command's exit code: 126 or 127 where crun could not execute it."""
        if code in _REFUSED:
            refused = exit_code_of(self._message.decode(errors="replace").strip())
            return refused if refused in (126, 127) else code
        return code

    def over(self) -> None:
        """Remove the ended command's cgroup. One that still has processes is left to the container."""
        if self._hanging is not None and self._hanging.active():
            self._hanging.cancel()
        if self._first is not None:
            self._first.close()
        if self._group is not None:
            self._groups.remove(self._group)


class FirstProcess:
    """Notices the end of a command whose crun waits for processes left behind, and kills these.

    :param path: the file that crun writes the command's pid to.
    :param drain: how often it looks, in seconds, which is how long these processes may go on at most.
    """

    def __init__(self, reactor: IReactorTime, path: Path, drain: float) -> None:
        self._reactor = reactor
        self._drain = drain
        self._crun = 0
        self._command = (0, 0)  # the pid and start_ticks of the command
        self._timer: IDelayedCall | None = None
        self.path = path

    def watch(self, crun: int) -> None:
        """Begin. :param crun: its pid."""
        self._crun = crun
        self._timer = self._reactor.callLater(self._drain, self._look)

    def _look(self) -> None:
        pid, ticks = self._command
        if not pid:
            with contextlib.suppress(OSError, ValueError):
                pid = int(self.path.read_text())
                ticks = start_ticks(pid)
                self._command = (pid, ticks)
        if pid and (not ticks or start_ticks(pid) != ticks):
            for left in family(self._crun)[1:]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(left, signal.SIGKILL)
        self._timer = self._reactor.callLater(self._drain, self._look)

    def close(self) -> None:
        """End. Idempotent."""
        if self._timer is not None and self._timer.active():
            self._timer.cancel()
        self.path.unlink(missing_ok=True)


def _same_processes(pid: int) -> bool:
    """Return whether a process is in the agent's PID namespace. False if the process is gone."""
    try:
        return os.readlink(f"/proc/{pid}/ns/pid") == os.readlink("/proc/self/ns/pid")
    except OSError:
        return False
