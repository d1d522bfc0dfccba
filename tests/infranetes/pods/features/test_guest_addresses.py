# SPDX-License-Identifier: Apache-2.0
"""A guest that never asks for its address is told of."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from infranetes.pods.features.guest_addresses import PATIENCE_SECONDS, GuestAddresses
from infranetes.providers.hypervisor import GuestState, GuestStatus
from infranetes_common.wire import cri
from tests.infranetes.pods.fakes import FakeNode, pod
from tests.infranetes.pods.features import test_guests


class Reporter:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []

    def unaddressed(self, pod: cri.PodSandboxMetadata, message: str) -> None:
        self.told.append((pod.name, message))


class AddressNode(test_guests.GuestNode):
    """A node that looks at its guests' addresses."""

    def __init__(self, directory: Path) -> None:
        self.reporter = Reporter()
        super().__init__(directory)

    def made(self) -> None:
        super().made()
        self.join(GuestAddresses(self.node.reactor, self.node.handlers.of, self.reporter))


class AddressTests(test_guests.GuestCase):
    world: AddressNode

    def make_world(self) -> FakeNode:
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = Path(directory.name) / "guests"
        return AddressNode(self.directory)

    def begun(self, config: Any = None) -> str:
        """Start a guest that has no address; return its sandbox."""
        sandbox, container = self.created(config)
        self.hypervisor.addressed = False
        self.do(self.world.containers.start(container))
        return sandbox

    def test_it_is_told_with_what_the_console_said_last(self) -> None:
        self.begun()
        self.hypervisor.console.say(b"eth0: no carrier\r\n\x1b[0m\r\n")
        self.world.wait(PATIENCE_SECONDS - 1.0)
        self.assertEqual(self.world.reporter.told, [])
        self.world.wait(2.0)
        [(_, message)] = self.world.reporter.told
        for words in ("eth0: no carrier", "DHCP", "10.0.0.1"):
            self.assertIn(words, message)

    def test_one_that_asks_in_time_or_that_can_not_be_told_is_not(self) -> None:
        for answer in (True, None):
            self.begun(pod(f"pod-{answer}"))
            self.hypervisor.addressed = answer
        self.world.wait(PATIENCE_SECONDS + 1.0)
        self.assertEqual(self.world.reporter.told, [])

    def test_one_that_has_ended_meanwhile_is_not(self) -> None:
        self.begun()
        self.hypervisor.become(GuestStatus(GuestState.OFF, 5, 9))
        self.world.wait(PATIENCE_SECONDS + 1.0)
        self.assertEqual(self.world.reporter.told, [])

    def test_one_whose_pod_is_stopped_is_not_looked_at(self) -> None:
        sandbox = self.begun()
        self.do(self.world.sandboxes.stop(sandbox))
        self.world.wait(PATIENCE_SECONDS + 1.0)
        self.assertEqual(self.world.reporter.told, [])

    def test_one_that_is_told_its_address_otherwise_is_not(self) -> None:
        self.begun(pod("a", annotations={"infranetes.io/network-config": "static"}))
        self.world.wait(PATIENCE_SECONDS + 1.0)
        self.assertEqual(self.world.reporter.told, [])
