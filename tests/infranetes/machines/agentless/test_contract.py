# SPDX-License-Identifier: Apache-2.0
"""The contract of agents, of guests that are reached in each way, and of our own agent."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from infranetes.machines.agent.client import AgentClient
from infranetes.machines.agentless.access import GuestFile, IGuestAccess
from infranetes.machines.agentless.agent import AgentlessAgent, GuestParts
from infranetes.machines.agentless.configuration import PodFacts
from infranetes.machines.agentless.ways import Ways
from infranetes.machines.sandbox_memory import SandboxMemory
from infranetes.providers.hypervisor import GuestState, GuestStatus
from infranetes_common.errors import Unavailable
from infranetes_common.reactors import installed
from infranetes_common.wire import vmserver
from tests.contract import agent as contract
from tests.infranetes.machines.agentless.agent_case import Told
from tests.infranetes.machines.agentless.fakes import FakeHypervisor, FakeWay
from tests.vmserver.harness import SANDBOX, Agent, run_directory
from vmserver.containers.machine.provider import MachineConfig, MachineProvider

reactor = installed()


class EchoingWay(FakeWay):
    """A way whose guest runs the suite's only command."""

    async def run(
        self, command: Sequence[str], seconds: int, limit: float, max_output: int, stdin: bytes = b""
    ) -> vmserver.ExecSyncResponse:
        return vmserver.ExecSyncResponse(stdout=b"out\n", stderr=b"err\n", exit_code=4)


class HypervisorAloneTests(contract.AgentContract):
    """A guest that can't be reached."""

    commands = False

    async def setUp(self) -> None:
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.hypervisor = FakeHypervisor()

        async def configure(facts: PodFacts, files: Mapping[str, GuestFile]) -> Told:
            return Told(facts, files)

        parts = GuestParts(
            self.sandbox,
            "127.0.0.1",
            lambda: self.hypervisor,
            Ways(reactor, self.sandbox, self.ways),
            configure,
            SandboxMemory(reactor, Path(directory.name), PodFacts),
            lambda: self.container,
            lambda: 77,
        )
        self.agent = AgentlessAgent(reactor, parts)

    def ways(self) -> Sequence[IGuestAccess]:
        """Return the ways into the guest."""
        return []

    async def test_a_guest_that_ends_by_itself_is_told(self) -> None:
        await self.running()
        events = self.watched()
        self.hypervisor.become(GuestStatus(GuestState.OFF, 5, 9, 3))
        self.assertEqual(events[-1].container.exit_code, 3)


class ReachedTests(HypervisorAloneTests):
    """A guest that one way leads into, and another does not."""

    commands = True

    def ways(self) -> Sequence[IGuestAccess]:
        closed = FakeWay("ssh")
        closed.answer = Unavailable("nothing listens on port 22")
        return [closed, EchoingWay("guest-agent")]


class OurAgentTests(contract.AgentContract):
    """A machine with our agent: the one that runs the tests."""

    sandbox = SANDBOX

    async def setUp(self) -> None:
        directory = run_directory(self)
        config = MachineConfig(
            state_dir=directory / "machine", stop_command=("true",), kill_command=("true",)
        )
        served = Agent(reactor, directory, provider=lambda: MachineProvider(reactor, config))
        await served.start()
        self.addCleanup(served.stop)
        self.agent = AgentClient(SANDBOX, served.channel())
