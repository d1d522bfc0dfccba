# SPDX-License-Identifier: Apache-2.0
"""The agents of simulated VMs: a process for each, on a loopback address of its own.

`python -m tests.support.clouds.agent_processes` reads commands as lines of JSON from its standard input, and
ends with it, as do all agents. It has imported the agent's code, so that forking one is quick::

    {"op": "start", "id": "i-1", "config": {...}}      with the agent's configuration
    {"op": "reboot", "id": "i-1", "config": {...}}     kill it first, and empty its run_dir but for `DISK`
    {"op": "kill", "id": "i-1"}                        like a power cut
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any, BinaryIO

ROOT = Path(__file__).resolve().parents[3]
DISK = "disk"  # the directory in an agent's run_dir that stands for its VM's disk
PR_SET_CHILD_SUBREAPER = 36  # prctl(2)


class AgentProcesses:
    """The test's side of the process that agents are forked from."""

    def __init__(self) -> None:
        self._input: Any = None

    @property
    def started(self) -> bool:
        """Whether the process that agents are forked from has been started."""
        return self._input is not None

    def start(self) -> None:
        """Start the process that agents are forked from. It ends with this one."""
        process = subprocess.Popen(
            ["setsid", "--fork", sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            cwd=ROOT,
        )
        process.wait()
        self._input = process.stdin

    def stop(self) -> None:
        """End it with every agent."""
        if self._input is not None:
            self._input.close()
            self._input = None

    def run(self, id: str, config: dict[str, Any]) -> None:
        """Start an agent."""
        self._say(op="start", id=id, config=config)

    def reboot(self, id: str, config: dict[str, Any]) -> None:
        """Kill an agent, and start it with no more than is on its disk."""
        self._say(op="reboot", id=id, config=config)

    def kill(self, id: str) -> None:
        """Kill an agent, like a power cut. Idempotent."""
        self._say(op="kill", id=id)

    def _say(self, **command: Any) -> None:
        if not self.started:
            self.start()
        self._input.write(json.dumps(command).encode() + b"\n")
        self._input.flush()


_shared = AgentProcesses()


def shared() -> AgentProcesses:
    """Return the object shared by all tests of this process, started."""
    if not _shared.started:
        _shared.start()
    return _shared


# ---- The process


def _agent(config: dict[str, Any]) -> None:
    from twisted.internet import reactor as _reactor
    from twisted.logger import globalLogBeginner, textFileLogObserver

    from infranetes_common.config import structure
    from tests.support.clouds.simulated_machine import SimulatedMachine
    from vmserver import config as configuration
    from vmserver.daemon import Vmserver

    reactor: Any = _reactor
    run_dir = Path(config["run_dir"])
    run_dir.mkdir(parents=True, exist_ok=True)
    log = (run_dir / "log").open("w")
    globalLogBeginner.beginLoggingTo([textFileLogObserver(log)], redirectStandardIO=False)
    file = run_dir / "vmserver.json"
    file.write_text(json.dumps(config))
    checked = configuration.check(structure(config, configuration.Config, source=str(file)), str(file))
    machine = None if checked.identity.apply else SimulatedMachine(checked.etc_dir)
    service = Vmserver(reactor, checked, applier=machine)
    reactor.callWhenRunning(service.startService)
    reactor.run()


def _start(config: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # its containers stay its descendants, see _kill
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _agent(config)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _empty(run_dir: Path) -> None:
    """Remove what is not on the disk."""
    if not run_dir.exists():
        return  # it was killed before it had begun
    for each in run_dir.iterdir():
        if each.is_dir() and each.name != DISK:
            shutil.rmtree(each)
        elif not each.is_dir():
            each.unlink()


def _kill(pid: int) -> None:
    """Kill an agent with its containers."""
    _signal(pid, signal.SIGSTOP)
    for each in [pid, *_descendants(pid)]:
        _signal(each, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _descendants(pid: int) -> list[int]:
    """Source: proc(5), /proc/PID/task/TID/children."""
    found = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as children:
                found += [int(child) for child in children.read().split()]
    return [*found, *(below for child in found for below in _descendants(child))]


def _serve(commands: BinaryIO) -> None:
    import tests.support.clouds.simulated_machine  # noqa: F401  all loaded before it is forked
    import vmserver.containers.machine
    import vmserver.daemon  # noqa: F401

    pids: dict[str, int] = {}
    descriptor = commands.fileno()
    buffer = b""
    try:
        while True:
            select.select([descriptor], [], [])
            data = os.read(descriptor, 65536)
            if not data:
                return
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                command = json.loads(line)
                old = pids.pop(command["id"], None)
                if old is not None:
                    _kill(old)
                if command["op"] == "reboot":
                    _empty(Path(command["config"]["run_dir"]))
                if command["op"] != "kill":
                    pids[command["id"]] = _start(command["config"])
    finally:
        for pid in pids.values():
            _kill(pid)


if __name__ == "__main__":
    _serve(sys.stdin.buffer)
