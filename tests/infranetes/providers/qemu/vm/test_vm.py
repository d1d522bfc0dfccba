# SPDX-License-Identifier: Apache-2.0
"""A VM as the daemon knows it, and tells of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
from twisted.trial.unittest import SynchronousTestCase

from infranetes.providers.interface import Attachment, Instance, InstanceState
from infranetes.providers.qemu.host.privileges import QemuUser
from infranetes.providers.qemu.vm.connections import VmConnections
from infranetes.providers.qemu.vm.paths import ProviderPaths
from infranetes.providers.qemu.vm.record import Phase, VmRecord
from infranetes.providers.qemu.vm.vm import Vm, on_bridge
from infranetes_common.reactors import installed
from tests.harness.needs import needs_root

TOKEN = "0123456789abcdef" * 2


@needs_root
class VmTests(SynchronousTestCase):
    """The instance, as the provider's callers get it, of a VM."""

    def vm(self, **fields: Any) -> Vm:
        record = attrs.evolve(VmRecord(TOKEN, "sandbox", "c", "n", "10.7.0.2", 12.5), **fields)
        return Vm(record, ProviderPaths(Path("/x"), Path("/x")).of_vm(record, QemuUser(0, 0)))

    def test_it_is_told_as_it_was_recorded(self) -> None:
        vm = self.vm(phase=Phase.FAILED, detail="no luck", agent_port=4242, more_addresses=("fd00::7",))
        self.assertEqual(
            vm.instance(),
            Instance(
                f"qemu-{TOKEN}",
                TOKEN,
                "sandbox",
                InstanceState.ENDED,
                address="10.7.0.2",
                more_addresses=("fd00::7",),
                agent_host="10.7.0.2",
                agent_port=4242,
                created_at=12.5,
                detail="no luck",
            ),
        )

    def test_why_one_has_ended_is_what_qemu_says_or_else_its_process(self) -> None:
        vm = self.vm()
        self.assertEqual(vm.explain_end(), "its process ended")
        connections = vm.connections = VmConnections(installed())
        for reason, words in (
            ("", "its process ended"),
            ("guest-panic", "the guest's kernel panicked"),
            ("guest-shutdown", "the guest shut down"),
            ("subsystem-reset", "QEMU says subsystem-reset"),
        ):
            connections.shutdown_reason = reason
            self.assertEqual(vm.explain_end(), words)

    def test_the_end_of_its_console_is_quoted_if_there_is_any(self) -> None:
        root = Path(self.mktemp())
        vm = self.vm(phase=Phase.FAILED, detail="no luck")
        vm.paths = ProviderPaths(root, root).of_vm(vm.record, QemuUser(0, 0))
        self.assertEqual(str(vm.ended_error()), f"VM {vm.record.id} has ended: no luck")
        vm.paths.directory.mkdir(parents=True)
        vm.paths.console.write_text("Kernel panic")
        self.assertTrue(str(vm.ended_error()).endswith("no luck; the end of its console:\nKernel panic"))

    def test_those_on_the_bridge_are_those_that_run_or_are_being_made(self) -> None:
        made, ended, elsewhere = (
            self.vm(),
            self.vm(phase=Phase.READY),
            self.vm(attachment=Attachment(Path("/run/netns/x"))),
        )
        made.launching = elsewhere.launching = True
        self.assertEqual(on_bridge([made, ended, elsewhere]), [made])
        self.assertEqual([made.state, ended.state], [InstanceState.PENDING, InstanceState.ENDED])
