# SPDX-License-Identifier: Apache-2.0
"""What the daemon asks of a VM's QEMU while it starts, and what QEMU and the guest may say to that."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionDone
from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from infranetes.providers.qemu.program.command_line import LINK, CommandLine
from infranetes.providers.qemu.program.identity_port import IdentityPort
from infranetes.providers.qemu.program.qmp import QmpConnection, QmpEvent
from infranetes.providers.qemu.settings import MIB
from infranetes.providers.qemu.vm import connections
from infranetes.providers.qemu.vm.connections import VmConnections
from infranetes.providers.qemu.vm.sizes import Hotplug
from infranetes_common.concurrency import start
from infranetes_common.errors import DeadlineExceeded, InfranetesError, Unavailable
from infranetes_common.reactors import IReactor

COMMAND_LINE = CommandLine("/usr/bin/qemu-system-x86_64", "QEMU 7.2", "tcg", 1024, 8192, 4)


class ConnectionsTests(SynchronousTestCase):
    """A QEMU that says yes to everything, and whose guest says what the test makes it say."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.transport = StringTransport()
        self.port_transport = StringTransport()
        self.answered = 0

        async def connect(
            reactor: IReactor,
            sockets: Path,
            on_event: Callable[[QmpEvent], None],
            on_lost: Callable[[], None],
        ) -> object:
            self.qmp, port = QmpConnection(reactor, on_event, on_lost), IdentityPort()
            self.qmp.makeConnection(self.transport)
            self.qmp.dataReceived(b'{"QMP": {"version": {}, "capabilities": []}}\r\n')
            port.makeConnection(self.port_transport)
            return self.qmp, port

        self.patch(connections, "connect", connect)
        self.connections = VmConnections(cast(IReactor, self.clock))
        self.successResultOf(start(self.connections.open(Path("/x"))))

    def asked(self) -> list[dict[str, Any]]:
        """Return all commands so far, and answer them, and those that follow from that."""
        while (
            len(found := [json.loads(each) for each in self.transport.value().splitlines()]) > self.answered
        ):
            for command in found[self.answered :]:
                self.answered += 1
                self.say({"return": {}, "id": command["id"]})
        return found[1:]  # without the negotiation

    def say(self, message: dict[str, Any]) -> None:
        self.qmp.dataReceived(json.dumps(message).encode() + b"\r\n")

    def event(self, name: str, **data: object) -> None:
        self.say({"event": name, "data": data, "timestamp": {}})

    def taken(self, device: str, source: int = 1, status: int = 0) -> None:
        self.event("ACPI_DEVICE_OST", info={"device": device, "source": source, "status": status})

    def words(self, failing: Deferred[None], kind: type[InfranetesError]) -> str:
        return str(self.failureResultOf(failing, kind).value)

    def hotplug(self) -> Deferred[None]:
        plugging = start(self.connections.hotplug(COMMAND_LINE, Hotplug(2, 256), 5.0))
        self.asked()
        return plugging

    def test_what_is_plugged_in_is_waited_for(self) -> None:
        plugging = self.hotplug()
        asked = [(each["execute"], each["arguments"]) for each in self.asked()]
        memory = [arguments for command, arguments in asked if command == "object-add"]
        self.assertEqual(sum(each["size"] for each in memory), 256 * MIB)
        devices = [arguments for command, arguments in asked if command == "device_add"]
        dimms = [f"dimm{number}" for number in range(len(memory))]
        self.assertEqual([each["id"] for each in devices], ["cpu1", "cpu2", *dimms])
        self.assertEqual([each["core-id"] for each in devices[:2]], [1, 2])
        self.assertEqual([each["memdev"] for each in devices[2:]], [each["id"] for each in memory])
        for device in ("cpu1", "cpu2", *dimms[1:], "other"):
            self.taken(device)
        self.taken("dimm0", source=3)  # of an ejection, which is not what is waited for
        self.assertNoResult(plugging)
        self.taken("dimm0")
        self.successResultOf(plugging)

    def test_a_guest_that_does_not_take_it_in_time_is_told(self) -> None:
        plugging = self.hotplug()
        self.clock.advance(5.1)
        self.assertIn("the guest's taking", self.words(plugging, DeadlineExceeded))

    def test_a_guest_that_refuses_it_is_told(self) -> None:
        plugging = self.hotplug()
        self.taken("cpu1", status=0x80)
        self.assertIn("the guest refuses cpu1 (status 128)", self.words(plugging, Unavailable))
        self.lose()

    def test_a_qemu_that_ends_meanwhile_is_told(self) -> None:
        plugging, loading = self.hotplug(), self.load()
        self.lose()
        self.assertIn("had all its memory", self.words(plugging, Unavailable))
        self.assertIn("had loaded the VM's state", self.words(loading, Unavailable))
        self.assertTrue(self.connections.lost)

    def lose(self) -> None:
        self.qmp.connectionLost(Failure(ConnectionDone()))

    def load(self) -> Deferred[None]:
        loading = start(self.connections.load_state(5.0))
        self.asked()
        return loading

    def test_the_templates_state_is_loaded_without_its_memory(self) -> None:
        loading = self.load()
        capabilities, incoming = self.asked()
        names = {each["capability"] for each in capabilities["arguments"]["capabilities"] if each["state"]}
        self.assertEqual(names, {"x-ignore-shared", "events"})
        self.assertEqual(incoming["execute"], "migrate-incoming")
        for status in ("setup", "active"):
            self.event("MIGRATION", status=status)
        self.assertNoResult(loading)
        self.event("MIGRATION", status="completed")
        self.successResultOf(loading)

    def test_a_state_that_can_not_be_loaded_is_told(self) -> None:
        loading = self.load()
        self.event("MIGRATION", status="failed")
        self.assertIn("QEMU could not load the VM's state", self.words(loading, Unavailable))

    def test_a_state_that_takes_too_long_is_told(self) -> None:
        loading = self.load()
        self.clock.advance(5.1)
        self.assertIn("loading a VM's state", self.words(loading, DeadlineExceeded))

    def test_a_vm_executes_with_its_link_up(self) -> None:
        resuming = start(self.connections.resume())
        link, resume = self.asked()
        self.assertEqual((link["execute"], link["arguments"]), ("set_link", {"name": LINK, "up": True}))
        self.assertEqual(resume["execute"], "cont")
        self.successResultOf(resuming)

    def test_why_qemu_ends_the_vm_is_known(self) -> None:
        self.assertEqual(self.connections.shutdown_reason, "")
        self.event("SHUTDOWN", guest=True, reason="guest-panic")
        self.assertEqual(self.connections.shutdown_reason, "guest-panic")

    def test_events_without_what_they_should_say_change_nothing(self) -> None:
        plugging = self.hotplug()
        for name in (
            "ACPI_DEVICE_OST",
            "DEVICE_DELETED",
            "MEM_UNPLUG_ERROR",
            "MIGRATION",
            "SHUTDOWN",
            "STOP",
        ):
            self.event(name)
        self.assertNoResult(plugging)
        self.assertEqual(self.connections.shutdown_reason, "")
        self.lose()
        self.failureResultOf(plugging, Unavailable)

    def test_both_are_closed_and_the_vm_goes_on(self) -> None:
        self.assertFalse(self.connections.lost)
        for _ in range(2):
            self.connections.close()
        self.assertTrue(self.transport.disconnected)
        self.assertTrue(self.port_transport.disconnected)
        self.assertEqual(self.asked(), [])
