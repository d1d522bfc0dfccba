# SPDX-License-Identifier: Apache-2.0
"""A test case with a daemon, honest agents, and an agent that attacks the daemon."""

from __future__ import annotations

import json
import struct
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from twisted.internet.defer import Deferred
from twisted.internet.error import ProcessDone, ProcessTerminated
from twisted.internet.interfaces import IProcessTransport
from twisted.internet.protocol import ProcessProtocol
from twisted.python.failure import Failure

from infranetes_common.concurrency import Notifier, start
from infranetes_common.wire import cri
from tests.harness.needs import needs_registry, repetitions
from tests.infranetes.daemon import case
from tests.infranetes.daemon.case import ROOT, DaemonCase, reactor
from tests.support import warm
from tests.support.hostile.watched import FORMAT

HONEST = repetitions(4, nightly=10)
CONSTANTS = {  # so that the daemon soon asks an agent again whose answer it has refused or waited for
    "infranetes.machines.agent.container_watch.REFUSED_DELAY": 1.5,
    "infranetes.machines.agent.container_watch.LAST_DELAY": 1.5,
    "infranetes.pods.vm.reports.LOG_SECONDS": 1.0,
    "infranetes.stats.gather.WAIT_SECONDS": 0.5,
}
WAIT_SECONDS = 60.0  # for an answer about an honest pod, on a machine of any speed


class HostileProcess(ProcessProtocol):
    """The hostile agent's process.

    :ivar errors: the end of what it wrote to standard error.
    """

    transport: IProcessTransport

    def __init__(self) -> None:
        self._output = b""
        self._output_came = Notifier()
        self.errors = b""
        self.ended: Deferred[None] = Deferred()

    def outReceived(self, data: bytes) -> None:
        self._output += data
        self._output_came.notify()

    def errReceived(self, data: bytes) -> None:
        self.errors = (self.errors + data)[-4000:]

    def processEnded(self, reason: Failure) -> None:
        reason.trap(ProcessDone, ProcessTerminated)
        self.ended.callback(None)
        self._output += b"ended\n"
        self._output_came.notify()

    async def line(self, expected: bytes) -> None:
        """Wait for its next line of output. :raise AssertionError: it is not the `expected` one."""
        while b"\n" not in self._output:
            await self._output_came.wait()
        line, _, self._output = self._output.partition(b"\n")
        assert line == expected, (line, self.errors.decode(errors="replace"))

    async def attack(self, corpus: Mapping[str, list[str]] | None = None, **attacks: str) -> None:
        """Replace the attacks in force, by method; without any the agent is honest."""
        self.transport.write(json.dumps({**attacks, "corpus": corpus or {}}).encode() + b"\n")
        await self.line(b"done")

    async def stop(self) -> None:
        """Kill the process."""
        self.transport.loseConnection()
        self.transport.signalProcess("KILL")
        await self.ended


@needs_registry
class HostileCase(DaemonCase):
    """A daemon with `HONEST` pods, and one whose agent `replace_agent` replaces with a HostileAgent.

    :ivar bad: the sandbox of that pod.
    :ivar victim: its container.
    :ivar pods: the honest pods' containers, by sandbox.
    """

    timeout = 240
    honest = HONEST
    reactor = reactor

    async def setUp(self) -> None:
        super().setUp()
        self.config["log"] = {"level": "info"}
        self.config["control"] = {"enter": True}
        self.config["times"] = {"unknown_after": 0.5}  # sooner than an agent that was refused is asked again
        self.volume = self.root / "volume"
        self.volume.mkdir()
        self.turns = self.root / "turns"
        self.forget_turns()
        self.environment |= {"WATCHED": str(self.turns), "CONSTANTS": json.dumps(CONSTANTS)}
        self.patch(case, "_TWISTD", (sys.executable, "-m", "tests.support.hostile.watched"))
        await self.start()
        self.pods: dict[str, str] = {}
        for number in range(self.honest):
            sandbox = await self.run_pod(f"honest{number}")
            self.pods[sandbox] = await self.run_container(sandbox, self.box(script="sleep 1000"))
        self.bad = await self.run_pod("bad")
        mounts = [cri.Mount(container_path="/data", host_path=str(self.volume))]
        self.victim = await self.run_container(self.bad, self.box(script="sleep 1000", mounts=mounts))

    async def replace_agent(self) -> HostileProcess:
        """Replace the bad pod's agent with a HostileAgent, which is honest until it is told to attack."""
        (vm,) = (vm for vm in await self.vms() if vm["sandbox_id"] == self.bad)
        kept = json.loads((self.root / "state" / "simulated" / vm["id"] / "identity.json").read_text())
        await self.farm("behave", id=vm["id"], behaviour="no-agent", after=0)
        given = {"identity": kept["identity"], "port": vm["port"], "containers": [self.victim]}
        hostile = HostileProcess()
        program = warm.command("-m", "tests.support.hostile", json.dumps(given))
        reactor.spawnProcess(
            hostile,
            program[0],
            program,
            env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
            path=str(ROOT),
        )
        self.addCleanup(lambda: start(hostile.stop()))
        await hostile.line(b"ready")
        await self.in_state(self.victim, cri.CONTAINER_RUNNING, 40.0)
        return hostile

    def memory(self, which: str = "VmRSS") -> int:
        """The daemon's memory, in MiB. :param which: a field of /proc/PID/status."""
        assert self.process is not None
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        (line,) = (line for line in status.splitlines() if line.startswith(which))
        return int(line.split()[1]) // 1024

    def forget_highest_memory(self) -> None:
        """Make `memory("VmHWM")` the highest since now."""
        assert self.process is not None
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    @property
    def longest_turn(self) -> float:
        """The longest turn of the daemon's reactor, in seconds of processor time."""
        return float(struct.unpack(FORMAT, self.turns.read_bytes())[0])

    @property
    def longest_call(self) -> float:
        """The longest time that the daemon took for an answer which it has at hand, about an honest pod.

        In seconds of its reactor's processor time.
        """
        return float(struct.unpack(FORMAT, self.turns.read_bytes())[1])

    def forget_turns(self) -> None:
        """Make `longest_turn` and `longest_call` those since now."""
        with open(self.turns, "r+b" if self.turns.exists() else "wb") as file:
            file.write(bytes(struct.calcsize(FORMAT)))

    async def call_honest(self, seconds: float) -> None:
        """Ask for the states and statistics of the honest pods and update them: once, and for so long."""
        until = time.monotonic() + seconds
        while True:
            for sandbox, container in self.pods.items():
                await self.runtime.PodSandboxStatus(
                    cri.PodSandboxStatusRequest(pod_sandbox_id=sandbox), timeout=WAIT_SECONDS
                )
                await self.runtime.ListContainers(
                    cri.ListContainersRequest(filter=cri.ContainerFilter(pod_sandbox_id=sandbox)),
                    timeout=WAIT_SECONDS,
                )
                await self.runtime.ContainerStats(
                    cri.ContainerStatsRequest(container_id=container), timeout=WAIT_SECONDS
                )
                resources = cri.LinuxContainerResources(cpu_shares=512)
                await self.runtime.UpdateContainerResources(
                    cri.UpdateContainerResourcesRequest(container_id=container, linux=resources),
                    timeout=WAIT_SECONDS,
                )
            if time.monotonic() > until:
                return
