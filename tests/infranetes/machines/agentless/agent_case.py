# SPDX-License-Identifier: Apache-2.0
"""A VM without our agent, and who asks it and listens to it."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from twisted.trial.unittest import SynchronousTestCase

from infranetes.machines.agentless.access import GuestFile
from infranetes.machines.agentless.agent import AgentlessAgent, GuestParts
from infranetes.machines.agentless.configuration import PodFacts
from infranetes.machines.agentless.ways import Ways
from infranetes.machines.sandbox_memory import SandboxMemory
from infranetes.providers.machine_images import Cd
from infranetes_common.concurrency import start
from infranetes_common.filesync.manifest import DIRECTORY, FILE, SYMLINK, Bounds, Change, Entry
from infranetes_common.identity import Network
from infranetes_common.wire import cri, vmserver
from tests.infranetes.machines.agentless.fakes import FakeHypervisor, FakeWay
from tests.support.inline_threads import InlineThreads

T = TypeVar("T")
BOUNDS = Bounds(1000, 1 << 30)
ID = "c" * 64


class Told:
    """What a guest is told, as one CD with what the test looks at."""

    def __init__(self, facts: PodFacts, files: Mapping[str, GuestFile]) -> None:
        self._facts, self._files = facts, files

    def cds(self, network: Network) -> tuple[Cd, ...]:
        content = {path: one.content for path, one in self._files.items()}
        return (Cd("cidata", {**content, "address": network.address.encode()}),)


class AgentCase(SynchronousTestCase):
    """An agent without agent of a guest with fake ways into it."""

    def setUp(self) -> None:
        self.reactor = InlineThreads()
        self.hypervisor = FakeHypervisor()
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.memory = SandboxMemory(self.reactor.reactor, Path(directory.name) / "guests", PodFacts)
        self.way = FakeWay()
        self.reached = True
        self.container = ID
        self.facts: list[PodFacts] = []
        self.agent = self.make_agent()

    def make_agent(self) -> AgentlessAgent:
        """Make an agent, as each daemon does."""

        async def configure(facts: PodFacts, files: Mapping[str, GuestFile]) -> Told:
            self.facts.append(facts)
            return Told(facts, files)

        parts = GuestParts(
            "s1",
            "127.0.0.1",
            lambda: self.hypervisor,
            Ways(self.reactor, "s1", lambda: [self.way] if self.reached else []),
            configure,
            self.memory,
            lambda: self.container,
            lambda: 77,
        )
        return AgentlessAgent(self.reactor.reactor, parts)

    def do(self, work: Any) -> Any:
        """Return what a coroutine returns that waits for nothing."""
        return self.successResultOf(start(work))

    def refused(self, kind: type[Exception], work: Any) -> str:
        """Return why a coroutine fails."""
        return str(self.failureResultOf(start(work), kind).value)

    def put(self, id: str, *changes: Change, file: bool = False) -> Any:
        """Return the coroutine that puts a volume."""

        async def sent() -> AsyncIterator[Change]:
            for change in changes:
                yield change

        return self.agent.put_volume(id, file=file, in_memory=True, bounds=BOUNDS, changes=sent())

    def secret(self, content: bytes, id: str = "v1") -> Any:
        """Return the coroutine that puts a Secret's volume, laid out as kubelet does."""
        return self.put(
            id,
            Entry(b"", DIRECTORY, 0o755, 0, 0),
            Entry(b"..2026", DIRECTORY, 0o755, 0, 0),
            Entry(b"..2026/key", FILE, 0o400, 0, 0, len(content), 1),
            content,
            Entry(b"..data", SYMLINK, 0o777, 0, 0, target=b"..2026"),
            Entry(b"key", SYMLINK, 0o777, 0, 0, target=b"..data/key"),
        )

    def create(self, *mounts: tuple[str, str], **more: Any) -> vmserver.ContainerState:
        """Create the container. :param mounts: paths in the guest, and what is mounted there."""
        return cast(vmserver.ContainerState, self.do(self.creation(*mounts, **more)))

    def creation(self, *mounts: tuple[str, str], **more: Any) -> Any:
        """Return the coroutine that creates the container."""
        config = cri.ContainerConfig(
            mounts=[
                cri.Mount(container_path=path, host_path=f"infranetes-volume:{source}")
                for path, source in mounts
            ],
            **more,
        )
        return self.agent.create(ID, "sha256:x", config, cri.PodSandboxConfig(hostname="web-0"))

    def run_guest(self, *mounts: tuple[str, str]) -> None:
        """Create and start the container."""
        self.create(*mounts)
        self.do(self.agent.start(ID))
