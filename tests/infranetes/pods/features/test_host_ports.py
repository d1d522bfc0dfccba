# SPDX-License-Identifier: Apache-2.0
"""Which sandboxes have host ports, and which host ports are in force."""

from __future__ import annotations

import attrs
from twisted.trial.unittest import SynchronousTestCase

from infranetes.hostports.mappings import HostPort
from infranetes.pods.features.host_ports import ports_in_force, ports_of, taken_ports
from infranetes.pods.node.handler_config import CNI
from infranetes.pods.node.inventory import Sandbox
from infranetes.pods.store.records import SandboxRecord
from infranetes.pods.store.states import SandboxState
from infranetes_common.wire import cri
from tests.infranetes.pods.fakes import lone_sandbox, pod


def sandbox(state: SandboxState) -> Sandbox:
    config = pod(port_mappings=[cri.PortMapping(host_port=8080, container_port=80)])
    record = SandboxRecord(
        id=state.value, token=state.value, state=state, name="web", config=config.SerializeToString(),
        runtime_handler="", created_at=1, provider="fake", kind="docker", address="10.0.0.1",
    )  # fmt: skip
    return lone_sandbox(record)


class HostPortTests(SynchronousTestCase):
    sandboxes = tuple(map(sandbox, SandboxState))

    def test_what_a_sandbox_asks_for(self) -> None:
        ports = ports_of(sandbox(SandboxState.READY))
        self.assertEqual((ports.sandbox_id, ports.pod, ports.address), ("ready", "default/web", "10.0.0.1"))
        self.assertEqual(ports.ports, (HostPort("tcp", "", 8080, 80),))

    def test_those_of_a_pod_in_a_cnis_network_are_the_cnis(self) -> None:
        there = sandbox(SandboxState.READY)
        there.record = attrs.evolve(there.record, network=CNI)
        self.assertEqual(ports_of(there).ports, ())

    def test_a_port_is_taken_until_its_sandbox_is_stopped(self) -> None:
        taken = {ports.sandbox_id for ports in taken_ports(self.sandboxes)}
        self.assertEqual(taken, {state.value for state in SandboxState} - {"stopped"})

    def test_a_port_is_in_force_while_its_sandbox_is_ready(self) -> None:
        """When a VM has ended by itself its address may be another one's."""
        in_force = {ports.sandbox_id for ports in ports_in_force(self.sandboxes)}
        self.assertEqual(in_force, {"ready"})

    def test_of_pods_with_one_address_the_newest_has_the_vm(self) -> None:
        lost, other = sandbox(SandboxState.READY), sandbox(SandboxState.READY)
        other.record = attrs.evolve(other.record, id="other", created_at=2)
        for sandboxes in ((lost, other), (other, lost)):
            self.assertEqual([ports.sandbox_id for ports in ports_in_force(sandboxes)], ["other"])
