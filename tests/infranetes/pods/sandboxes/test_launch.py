# SPDX-License-Identifier: Apache-2.0
"""A launch that is cancelled, fails or outlives its daemon, and what it tells the pod's other parts."""

from __future__ import annotations

from functools import partial
from typing import Any

import attrs
from twisted.internet.defer import CancelledError, Deferred
from zope.interface import alsoProvides

from infranetes.hostports.mappings import HostPort
from infranetes.machines.ids import new_id
from infranetes.machines.pool_config import PoolConfig, PoolSize
from infranetes.machines.renewal import LATEST_SECONDS, SOON_SECONDS
from infranetes.pods.node.inventory import Sandbox
from infranetes.pods.sandboxes.launch import IDLE_SECONDS
from infranetes.pods.store.records import SandboxRecord
from infranetes.pods.store.states import ContainerState, SandboxState
from infranetes.pods.vm.sandbox_vm import machine_for
from infranetes.providers.interface import IGivesIdentityPrivately
from infranetes_common.concurrency import start
from infranetes_common.errors import DeadlineExceeded, FailedPrecondition, ResourceExhausted, Unavailable
from infranetes_common.wire import cri
from tests.infranetes.pods.case import PodsTestCase
from tests.infranetes.pods.fakes import FakeNode, box, pod

PORT = HostPort("tcp", "", 8080, 80)


def with_port(name: str = "web") -> Any:
    """Return a pod that asks for PORT."""
    return pod(name, port_mappings=[cri.PortMapping(host_port=8080, container_port=80)])


class StoppingDaemonTests(PodsTestCase):
    """A daemon that is stopped leaves its launches to the next one."""

    def test_a_launch_under_way_is_not_undone(self) -> None:
        for held in ("launching", "booting"):
            waiting: Deferred[None] = Deferred()
            setattr(self.world.provider, held, waiting)
            launching = self.start(pod(held))
            launching.addErrback(lambda failure: None)
            (id,) = (one.id for one in self.world.node.inventory if one.state is SandboxState.LAUNCHING)
            self.world.stop()
            waiting.callback(None)
            self.assertNotIn("destroy", [call for call, _ in self.world.provider.calls])
            self.assertEqual(self.record(id).state, SandboxState.LAUNCHING)
            setattr(self.world.provider, held, None)
            self.world.restart()
            self.assertEqual(self.record(id).state, SandboxState.READY)
            self.assertEqual(self.run_pod(pod(held)), id)
        self.assertEqual(len(self.world.provider.instances), 2)

    def test_one_that_fails_just_then_is_not_undone_either(self) -> None:
        booting = self.world.provider.booting = Deferred()
        launching = self.start()
        (sandbox,) = self.world.node.inventory
        self.world.node.stopping.succeed(None)
        booting.errback(Unavailable("the connection to the cloud was closed"))
        self.failureResultOf(launching, Unavailable)
        self.assertEqual(self.record(sandbox.id).state, SandboxState.LAUNCHING)
        self.assertEqual(len(self.world.provider.instances), 1)


class LaunchCase(PodsTestCase):
    def a_launching_sandbox(self) -> Sandbox:
        config = pod()
        record = SandboxRecord(
            new_id(),
            new_id(),
            SandboxState.LAUNCHING,
            "name",
            config.SerializeToString(),
            "",
            1,
            "fake",
            "docker",
        )
        sandbox = Sandbox(record, partial(machine_for, self.world.node.providers, self.world.node.inventory))
        self.world.node.inventory.add(sandbox)
        return sandbox


class UndoTests(LaunchCase):
    """A launch that fails or is cancelled is undone to the end."""

    def test_a_second_cancellation_does_not_end_the_undo(self) -> None:
        self.world.provider.booting = Deferred()
        hold: Deferred[None] = Deferred()
        steps: list[str] = []

        async def undo(sandbox: Sandbox) -> None:
            steps.append("begun")
            await hold
            steps.append("done")

        launching = start(self.world.node.launches.launch(self.a_launching_sandbox(), undo))
        for _ in range(2):
            launching.cancel()
            self.assertEqual(steps, ["begun"])
        self.failureResultOf(launching, CancelledError)
        hold.callback(None)
        self.assertEqual(steps, ["begun", "done"])

    def test_a_pod_whose_connection_is_closed_meanwhile_does_not_become_ready(self) -> None:
        booting = self.world.provider.booting = Deferred()
        launching = self.start()
        (sandbox,) = self.world.node.inventory
        self.world.agents[sandbox.id].silent = True
        booting.callback(None)
        self.assertNoResult(launching)
        self.world.node.connections.disconnect(sandbox)
        self.assertIn("ended the connection", str(self.failureResultOf(launching, Unavailable).value))
        self.assertNothingLeft()

    def test_the_time_of_a_launch_is_that_of_all_its_steps_together(self) -> None:
        booting = self.world.provider.booting = Deferred()
        launching = self.start()
        (agent,) = self.world.agents.values()
        agent.silent = True
        self.world.wait(self.world.times.launch - 10, step=10)
        booting.callback(None)
        self.assertNoResult(launching)
        self.world.wait(11)
        self.failureResultOf(launching, DeadlineExceeded)
        self.assertNothingLeft()


class OrderTests(LaunchCase):
    """What comes before what, and what each is told."""

    def test_its_turn_is_waited_for_before_anything_is_made_ready(self) -> None:
        steps: list[str] = []

        async def before_launch(sandbox: Sandbox) -> None:
            steps.append("its turn")

        async def prepare() -> None:
            steps.append("its disk")

        async def undo(sandbox: Sandbox) -> None:
            steps.append("undone")

        self.patch(self.world.node.features, "before_launch", before_launch)
        sandbox = self.a_launching_sandbox()
        self.world.provider.launch_error = Unavailable("no capacity")
        self.failureResultOf(start(self.world.node.launches.launch(sandbox, undo, prepare)), Unavailable)
        self.assertEqual(steps, ["its turn", "its disk", "undone"])

    def test_the_agent_has_the_nodes_dns_and_the_record_all_addresses(self) -> None:
        self.world.dns = cri.DNSConfig(servers=["10.0.0.53"])
        self.world.provider.more_addresses = ("fd00::1", "fd00::2")
        id = self.run_pod()
        self.assertEqual(self.world.agents[id].node_dns, [self.world.dns])
        self.assertEqual(self.record(id).more_addresses, "fd00::1 fd00::2")


class HostPortTests(PodsTestCase):
    """Host ports lead to the pod's VM from just before it is ready until just before the VM is destroyed."""

    def test_they_are_opened_once_all_else_is_done_and_closed_with_the_pod(self) -> None:
        booting = self.world.provider.booting = Deferred()
        launching = self.start(with_port())
        (agent,) = self.world.agents.values()
        agent.away = True
        booting.callback(None)
        self.assertEqual(self.world.table.ports, {})
        agent.away = False
        self.world.wait(5)
        id = self.successResultOf(launching)
        self.assertEqual(self.world.table.ports, {PORT: self.record(id).address})
        self.do(self.world.sandboxes.stop(id))
        self.assertEqual(self.world.table.ports, {})

    def test_a_pod_whose_ports_can_not_be_opened_is_not_ready(self) -> None:
        real = self.world.table.replace

        async def refuse(ports: Any) -> None:
            if ports:
                raise ResourceExhausted("the table is full")
            await real(ports)

        self.patch(self.world.table, "replace", refuse)
        self.failureResultOf(self.start(with_port()), ResourceExhausted)
        self.assertNothingLeft()
        self.assertEqual(self.world.table.ports, {})

    def test_they_are_closed_when_the_record_can_not_be_written(self) -> None:
        real = self.world.table.replace

        async def full(ports: Any) -> None:
            await real(ports)
            self.world.store.failing = ResourceExhausted("full") if ports else None

        self.patch(self.world.table, "replace", full)
        self.failureResultOf(self.start(with_port()), ResourceExhausted)
        self.assertEqual(self.world.table.ports, {})

    def test_they_do_not_lead_to_the_vm_that_has_the_address_of_a_lost_one(self) -> None:
        id = self.run_pod(with_port())
        (lost,) = self.world.provider.instances
        self.world.provider.end(lost, "terminated")
        del self.world.provider.instances[lost]
        self.assertEqual(self.record(self.run_pod(pod("other"))).address, self.record(id).address)
        self.assertEqual(self.world.table.ports, {})
        self.failureResultOf(self.start(with_port("third")), FailedPrecondition)  # the port is still taken
        self.world.restart()
        self.assertEqual(self.world.table.ports, {})

    def test_nor_to_that_of_a_vm_that_is_gone_without_a_word(self) -> None:
        id = self.run_pod(with_port())
        self.world.provider.instances.clear()  # the next pass will notice it
        other = self.run_pod(pod("other"))
        self.assertEqual(self.record(other).address, self.record(id).address)
        self.assertEqual(self.world.table.ports, {})

    def test_the_next_daemon_has_them_too(self) -> None:
        id = self.run_pod(with_port())
        self.world.table.ports = {}
        self.world.restart()
        self.assertEqual(self.world.table.ports, {PORT: self.record(id).address})


class CertificateTests(PodsTestCase):
    """Each pod's VM gets one certificate that has not been in its user-data, and no more."""

    def make_world(self) -> FakeNode:
        return FakeNode(pool=PoolConfig(sizes=(PoolSize(count=1),)), launch=100.0)

    def count(self, id: str) -> int:
        self.world.wait(2 * SOON_SECONDS)
        return len(self.world.agents[id].certificates)

    def test_a_vm_of_its_own(self) -> None:
        self.assertEqual(self.count(self.run_pod(pod(annotations={"infranetes.io/size": "x"}))), 1)

    def test_one_of_the_pool(self) -> None:
        (waiting,) = self.world.node.pools.own.idle()
        self.assertEqual(self.count(waiting.id), 1)
        self.assertEqual(self.run_pod(), waiting.id)
        self.assertEqual(self.count(waiting.id), 2, "another one as it becomes the pod's")

    def test_where_the_first_key_came_privately_it_stays(self) -> None:
        alsoProvides(self.world.provider, IGivesIdentityPrivately)
        own = self.run_pod(pod("own", annotations={"infranetes.io/size": "x"}))
        self.assertEqual(self.count(own), 0)
        until = self.record(own).certificate_until / 1e9 - self.world.clock.seconds()
        self.assertGreater(until, self.world.times.certificate - 60, "a whole lifetime")
        self.world.wait(self.world.times.certificate * 0.7, step=60)
        self.assertEqual(self.count(own), 1, "after half of it, as others")

    def test_one_of_the_pool_whose_first_key_came_privately(self) -> None:
        self.world = FakeNode(pool=PoolConfig(sizes=(PoolSize(count=1),)), launch=100.0)
        alsoProvides(self.world.provider, IGivesIdentityPrivately)
        self.world.provider_ready()
        self.addCleanup(self.world.kill)
        (waiting,) = self.world.node.pools.own.idle()
        self.assertEqual(self.run_pod(), waiting.id)
        self.assertEqual(self.count(waiting.id), 0)

    def test_elsewhere_it_waits_until_no_container_is_being_started(self) -> None:
        own = self.run_pod(pod(annotations={"infranetes.io/size": "x"}))
        agent = self.world.agents[own]
        agent.holding = Deferred()
        creating = start(self.world.containers.create(own, box()))
        self.world.wait(90.0, step=1)
        self.assertEqual(len(agent.certificates), 0)
        held, agent.holding = agent.holding, None
        held.callback(None)
        made = self.successResultOf(creating)
        self.do(self.world.containers.start(made))
        self.world.wait(IDLE_SECONDS - 1)
        self.assertEqual(len(agent.certificates), 0)
        self.assertEqual(self.count(own), 1)

    def test_it_is_not_idle_while_a_container_is_on_its_way_or_has_just_begun(self) -> None:
        own = self.run_pod(pod(annotations={"infranetes.io/size": "x"}))
        sandbox = self.world.node.inventory.sandboxes[own]
        made = self.do(self.world.containers.create(own, box()))
        container, busy = sandbox.containers[made], self.world.node.launches._is_starting_containers
        now, ago = self.world.now(), self.world.now() - int((IDLE_SECONDS + 1) * 1e9)
        for state, created, started, expected in (
            (ContainerState.CREATING, ago, 0, True),
            (ContainerState.CREATED, ago, 0, True),
            (ContainerState.STARTING, ago, 0, True),
            (ContainerState.RUNNING, ago, ago, False),
            (ContainerState.RUNNING, ago, now, True),
            (ContainerState.RUNNING, now, 0, True),
        ):
            container.record = attrs.evolve(
                container.record, state=state, created_at=created, started_at=started
            )
            self.assertEqual(busy(sandbox), expected, (state, created, started))
        container.record = attrs.evolve(container.record, created_at=ago, started_at=ago)
        self.patch(type(sandbox.loads), "busy", True)
        self.assertTrue(busy(sandbox), "an image is brought")

    def test_a_pod_that_is_never_idle_gets_it_all_the_same(self) -> None:
        own = self.run_pod(pod(annotations={"infranetes.io/size": "x"}))
        self.world.agents[own].holding = Deferred()
        start(self.world.containers.create(own, box())).addErrback(lambda _: None)
        self.world.wait(LATEST_SECONDS + 2 * SOON_SECONDS, step=1)
        self.assertEqual(len(self.world.agents[own].certificates), 1)

    def test_a_launch_that_the_next_daemon_continues(self) -> None:
        self.world.provider.booting = Deferred()
        self.start(pod(annotations={"infranetes.io/size": "x"}))
        (sandbox,) = self.world.node.inventory
        self.world.provider.booting = None
        self.world.restart()
        self.assertEqual(self.record(sandbox.id).state, SandboxState.READY)
        self.assertEqual(self.count(sandbox.id), 1)
