# SPDX-License-Identifier: Apache-2.0
"""One VM's power: on while this process runs, off when it ends or its input does.

    python -m infranetes_simulation.machine.hypervisor DIRECTORY

The first line of its input is a `MachineSpec` as JSON; each further one changes the agent's behaviour
(`guest`). It writes ``running`` once the VM runs. It ends when the VM does, and then only the VM's directory
is left. If it is killed, the VM's cgroup is left too.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import NotRequired, TypedDict

from infranetes_simulation.machine import cgroups, network
from infranetes_simulation.machine.guest import read_line

END_SECONDS = 15.0

#: VMs lack these capabilities: the clock, the modules and the power are the whole machine's.
_NOT_GIVEN = "-sys_time,-sys_module,-sys_boot"


class MachineSpec(TypedDict):
    """The description of a VM to start."""

    id: str
    address: str  # with the length of its prefix; "": its agent sets one
    gateway: str  # likewise: the machine's own, on the bridge
    bridge: str
    lock: str  # a file; whoever has locked it may change the bridge
    cgroup: str  # the cgroup's path
    behaviour: str  # of the agent
    configuration: NotRequired[str]  # the agent's, in place of `guest.CONFIGURATION`


class _TurnedOff(Exception):
    """SIGTERM."""


def _off(number: int, frame: FrameType | None) -> None:
    raise _TurnedOff


class Hypervisor:
    """A VM and its resources on the machine."""

    def __init__(self, hardware: MachineSpec, directory: str) -> None:
        self._hardware = hardware
        self._lock = Path(hardware["lock"])
        self._cable = network.cable_of(hardware["bridge"], hardware["id"])
        self._first = 0  # the VM's first process
        namespaces = ("--mount", "--ipc", "--uts", "--net", "--pid", "--fork", "--kill-child")
        self._outer = subprocess.Popen(  # noqa: S603
            [
                *("setpriv", "--pdeathsig", "KILL", "--bounding-set", _NOT_GIVEN, "--"),
                *("unshare", *namespaces, "--propagation", "private", "--"),
                *(sys.executable, "-m", "infranetes_simulation.machine.guest", directory),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    def turn_on(self) -> None:
        """Start the VM. :raise OSError, subprocess.CalledProcessError: it can't be started."""
        assert self._outer.stdout is not None
        if self._outer.stdout.readline() != b"up\n":
            raise OSError("its first process has ended")
        self._first = _child_of(self._outer.pid)
        hardware = self._hardware
        cgroups.join(hardware["cgroup"], self._first)
        network.plug_in(self._lock, hardware["bridge"], self._cable, hardware["gateway"], self._first)
        self.tell(json.dumps(hardware))
        if self._outer.stdout.readline() != b"running\n":
            raise OSError("its first process could not set it up")

    def tell(self, line: str) -> None:
        """Send its first process a line."""
        assert self._outer.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._outer.stdin.write(line.encode() + b"\n")
            self._outer.stdin.flush()

    def wait(self) -> None:
        """Pass the input to the VM until one of them ends."""
        ended = os.pidfd_open(self._outer.pid)
        while True:
            ready, _, _ = select.select([0, ended], [], [])
            if ended in ready:
                return
            line = read_line()
            if not line:
                return
            self.tell(line.strip())

    def turn_off(self) -> None:
        """Stop the VM, whatever its state, and release its resources. Idempotent."""
        for pid in (self._first, self._outer.pid):
            if pid and self._outer.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._outer.wait()
        try:
            network.unplug(self._lock, self._hardware["bridge"], self._cable)
        finally:  # the farm's directory may have been removed
            cgroups.remove(self._hardware["cgroup"], END_SECONDS)


def _child_of(pid: int) -> int:
    """Return a process's one child. :raise OSError: it has none."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                # proc(5): pid (comm) state ppid; comm may hold anything
                if int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1]) == pid:
                    return int(name)
    raise OSError("its first process has ended")


def main(directory: str) -> int:
    """Run the program."""
    signal.signal(signal.SIGTERM, _off)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    hardware: MachineSpec = json.loads(read_line())
    hypervisor = Hypervisor(hardware, directory)
    try:
        hypervisor.turn_on()
        print("running", flush=True)
        hypervisor.wait()
    except _TurnedOff:
        return 0
    except subprocess.CalledProcessError as error:
        print(f"{' '.join(error.cmd)}: {error.stderr.strip()}", file=sys.stderr)
        return 1
    except OSError as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        hypervisor.turn_off()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
