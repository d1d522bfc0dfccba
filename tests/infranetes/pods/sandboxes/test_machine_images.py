# SPDX-License-Identifier: Apache-2.0
"""Pods whose image is the VM: it boots when the container is created, and does not outlive the container."""

from __future__ import annotations

from typing import Any

import attrs
from twisted.internet.defer import Deferred

from infranetes.cri.translate import sandbox_state
from infranetes.pods.node.times import MACHINE_DRAIN_SECONDS
from infranetes.pods.store.records import SandboxRecord
from infranetes.pods.store.states import ContainerState, SandboxState
from infranetes.pods.vm.reports import LOG_SECONDS
from infranetes.providers.interface import InstanceState
from infranetes_common.concurrency import start
from infranetes_common.errors import AlreadyExists, FailedPrecondition, InfranetesError, Unavailable
from infranetes_common.wire import cri
from tests.infranetes.pods.case import PodsTestCase
from tests.infranetes.pods.fake_images import FakeImages, image
from tests.infranetes.pods.fakes import FakeNode, box, pod


class Machines(FakeImages):
    """The only image is a machine."""

    image = image(machine="machine-1")
    machine_images = True


class MachineImageNode(FakeNode):
    """A node whose images are machines."""

    def make_images(self) -> FakeImages:
        return Machines()


class MachineImagesTestCase(PodsTestCase):
    def setUp(self) -> None:
        self.world = MachineImageNode()
        self.world.provider_ready()
        self.addCleanup(self.world.kill)

    @property
    def provider(self) -> Any:
        return self.world.provider

    def create(self, sandbox: str, config: Any = None) -> Deferred[str]:
        return start(self.world.containers.create(sandbox, config or box()))

    def booted(self) -> tuple[str, str]:
        """Return the ids of a pod and its container."""
        sandbox = self.run_pod()
        return sandbox, self.successResultOf(self.create(sandbox))

    def fails(self, work: Deferred[Any], kind: type[Exception]) -> str:
        return str(self.failureResultOf(work, kind).value)

    def assertVacant(self, id: str) -> None:
        """Assert that the sandbox exists, with neither VM nor container."""
        self.assertEqual(self.provider.instances, {})
        record = self.record(id)
        self.assertEqual((record.state, record.image, record.instance_id), (SandboxState.VACANT, "", ""))
        self.assertEqual(self.world.store.contents().containers, ())


class BootTests(MachineImagesTestCase):
    """The VM's life."""

    def test_a_sandbox_is_ready_without_a_vm(self) -> None:
        id = self.run_pod()
        self.assertVacant(id)
        self.assertEqual(self.provider.calls, [])
        sandbox = self.world.node.inventory.sandbox(id)
        self.assertEqual(sandbox_state(sandbox), cri.SANDBOX_READY)

    def test_one_that_runs_from_the_image_is_not_booted_again_and_from_another_it_can_not_be(self) -> None:
        id, _ = self.booted()
        sandbox, machines = self.world.node.inventory.sandbox(id), self.world.node.machine_images
        for _ in range(2):
            self.do(machines.boot(sandbox, image(machine="machine-1"), box()))
        words = self.fails(
            start(machines.boot(sandbox, image(machine="machine-2"), box())), FailedPrecondition
        )
        self.assertIn("it is ready from image machine-1", words)
        self.assertEqual(len(self.provider.specs), 1)

    def test_the_container_boots_its_image_and_nothing_is_loaded(self) -> None:
        sandbox, container = self.booted()
        self.assertEqual([spec.request.image for spec in self.provider.specs], ["machine-1"])
        record = self.record(sandbox)
        self.assertEqual((record.state, record.image), (SandboxState.READY, "machine-1"))
        self.assertTrue(record.address)
        agent = self.world.agents[sandbox]
        self.assertEqual(agent.loads, [])
        self.do(self.world.containers.start(container))
        self.assertEqual(self.world.node.inventory.container(container).state, ContainerState.RUNNING)

    def test_a_pass_over_the_vms_leaves_a_boot_alone_that_is_only_being_recorded(self) -> None:
        id = self.run_pod()
        on_disk = self.hold_records()
        creating = self.create(id)
        passing = start(self.world.reconciler.once(self.world.node_provider))
        on_disk.callback(None)
        self.successResultOf(passing)
        self.successResultOf(creating)
        record = self.world.node.inventory.sandbox(id).record
        self.assertEqual((record.state, record.image), (SandboxState.READY, "machine-1"))
        self.assertEqual([each.id for each in self.provider.instances.values()], [record.instance_id])

    def test_stopping_while_its_boot_is_only_being_recorded(self) -> None:
        id = self.run_pod()
        on_disk = self.hold_records()
        creating = self.create(id)
        stopping = start(self.world.sandboxes.stop(id))
        on_disk.callback(None)
        self.successResultOf(stopping)
        self.assertIn("stopped", self.fails(creating, Unavailable))
        self.assertEqual(self.provider.instances, {})
        self.assertEqual(self.record(id).state, SandboxState.STOPPED)

    def hold_records(self) -> Deferred[None]:
        """Hold up writes of sandboxes' records until this fires."""
        on_disk: Deferred[None] = Deferred()
        real = self.world.store.put_sandbox

        def put(record: SandboxRecord) -> Deferred[None]:
            written: Deferred[None] = Deferred(lambda _: None)
            on_disk.addCallback(lambda _: None if written.called else written.callback(None))
            return real(record).addCallback(lambda _: written)

        self.patch(self.world.store, "put_sandbox", put)
        return on_disk

    def test_the_image_is_recorded_before_the_vm_is_asked_for(self) -> None:
        id = self.run_pod()
        seen: list[Any] = []
        real = self.provider.launch

        def launch(spec: Any) -> Any:
            seen.append(self.record(id))
            return real(spec)

        self.provider.launch = launch
        self.successResultOf(self.create(id))
        self.assertEqual([(one.state, one.image) for one in seen], [(SandboxState.BOOTING, "machine-1")])
        self.assertEqual(seen[0].token, self.provider.specs[0].token)

    def test_creating_twice_boots_once(self) -> None:
        id = self.run_pod()
        self.provider.booting = Deferred()
        creates = [self.create(id) for _ in range(3)]
        self.assertEqual(sandbox_state(self.world.node.inventory.sandbox(id)), cri.SANDBOX_READY)
        self.provider.booting.callback(None)
        self.assertEqual(len({self.successResultOf(one) for one in creates}), 1)
        self.assertEqual(len(self.provider.specs), 1)

    def test_a_second_container_is_refused(self) -> None:
        sandbox, container = self.booted()
        self.assertIn(container, self.fails(self.create(sandbox, box("other")), FailedPrecondition))
        self.assertEqual(len(self.provider.instances), 1)

    def test_stopping_and_removing_end_the_vm_and_twice_is_once(self) -> None:
        for made in (False, True):
            sandbox = self.run_pod(pod(uid=f"u{made}"))
            if made:
                self.successResultOf(self.create(sandbox))
            for _ in range(2):
                self.do(self.world.sandboxes.stop(sandbox))
            self.assertEqual(self.provider.instances, {})
            for _ in range(2):
                self.do(self.world.sandboxes.remove(sandbox))
        self.assertNothingLeft()

    def test_removing_the_container_ends_the_vm_and_another_may_boot(self) -> None:
        for reachable in (True, False):
            sandbox, container = self.booted()
            self.do(self.world.containers.start(container))
            if not reachable:
                self.world.agents[sandbox].go_away()
            removing = start(self.world.containers.remove(container))
            self.world.wait(30.0)
            self.successResultOf(removing)
            self.do(self.world.containers.remove(container))
            self.assertVacant(sandbox)
            left = self.record(sandbox)
            facts = (left.image, left.instance_id, left.address, left.agent_host, left.agent_port)
            self.assertEqual(facts, ("", "", "", "", 0), "nothing of the former VM is the next one's")
            self.assertEqual((left.certificate_until, left.certificate_key), (0, ""))
            self.successResultOf(self.create(sandbox))
            self.assertEqual(len(self.provider.instances), 1)
            self.do(self.world.sandboxes.remove(sandbox))
            self.assertNothingLeft()

    def test_the_log_of_a_machine_that_is_gone_is_not_waited_for_long(self) -> None:
        sandbox, container = self.booted()
        self.do(self.world.containers.start(container))
        self.world.logs.slow = Deferred()
        stopping = start(self.world.sandboxes.stop(sandbox))
        self.assertNoResult(stopping)
        self.world.wait(3.0)
        self.successResultOf(stopping)
        self.assertEqual(self.provider.instances, {})

    def test_removing_a_container_that_runs_stops_it_and_one_that_has_ended_waits_for_its_log(self) -> None:
        for attempt, ends in enumerate((False, True)):
            sandbox = self.run_pod(pod(str(attempt)))
            container = self.successResultOf(self.create(sandbox))
            self.do(self.world.containers.start(container))
            agent = self.world.agents[sandbox]
            if ends:
                agent.become(container, cri.CONTAINER_EXITED)
            self.world.logs.slow = Deferred()
            removing = start(self.world.containers.remove(container))
            self.assertEqual(("stop 0", container) in agent.calls, not ends)
            self.assertNoResult(removing)
            self.world.logs.slow.callback(None)
            self.world.logs.slow = None
            self.successResultOf(removing)
            self.assertVacant(sandbox)

    def test_the_log_of_a_machine_that_is_removed_is_not_waited_for_long_either(self) -> None:
        for attempt, ends in enumerate((False, True)):
            sandbox = self.run_pod(pod(str(attempt)))
            container = self.successResultOf(self.create(sandbox))
            self.do(self.world.containers.start(container))
            self.world.logs.slow = Deferred()
            if ends:
                self.world.agents[sandbox].become(container, cri.CONTAINER_EXITED)
                self.world.wait(LOG_SECONDS)  # until its end is told all the same
            self.world.logs.slow = Deferred()
            removing = start(self.world.containers.remove(container))
            self.world.wait(MACHINE_DRAIN_SECONDS - 1)
            self.assertNoResult(removing)
            self.world.wait(LOG_SECONDS if not ends else 1.0)
            self.successResultOf(removing)
            self.world.logs.slow = None
            self.assertVacant(sandbox)

    def test_a_vm_that_ends_by_itself_is_the_end_of_the_pod(self) -> None:
        sandbox, container = self.booted()
        (instance,) = self.provider.instances.values()
        self.provider.ended(attrs.evolve(instance, state=InstanceState.ENDED, detail="powered off"))
        self.assertEqual(self.record(sandbox).state, SandboxState.LOST)
        self.fails(self.create(sandbox, box("again")), FailedPrecondition)
        self.assertEqual(self.world.node.inventory.container(container).state, ContainerState.EXITED)

    def test_asking_for_the_same_pod_again_is_refused(self) -> None:
        self.run_pod()
        self.fails(self.start(), AlreadyExists)
        self.run_pod(pod(attempt=1))


class FailureTests(MachineImagesTestCase):
    """If a step fails, the VM is terminated."""

    def test_a_launch_that_is_refused(self) -> None:
        id = self.run_pod()
        self.provider.launch_error = Unavailable("no capacity")
        self.assertIn("no capacity", self.fails(self.create(id), Unavailable))
        self.assertVacant(id)
        self.provider.launch_error = None
        self.successResultOf(self.create(id))
        tokens = [spec.token for spec in self.provider.specs]
        self.assertEqual(len(set(tokens)), 2)
        self.assertEqual(self.world.images.checked, [Machines.image.id], "whether it is still there")

    def test_a_vm_that_ends_while_it_boots(self) -> None:
        id = self.run_pod()
        self.provider.booting = Deferred()
        creating = self.create(id)
        (instance,) = self.provider.instances.values()
        self.provider.ended(attrs.evolve(instance, state=InstanceState.ENDED, detail="panic"))
        self.assertIn("panic", self.fails(creating, Unavailable))
        self.assertVacant(id)

    def test_an_agent_that_refuses_the_container(self) -> None:
        id = self.run_pod()
        real = self.provider.launch

        def launch(spec: Any) -> Any:
            launched = real(spec)

            async def create(*_: Any) -> Any:
                raise FailedPrecondition("not such a machine")

            self.world.agents[spec.sandbox_id].create = create  # type: ignore[method-assign,assignment]
            return launched

        self.provider.launch = launch
        self.assertIn("not such", self.fails(self.create(id), FailedPrecondition))
        self.assertVacant(id)

    def test_a_vm_that_can_not_be_destroyed_is_tried_again(self) -> None:
        id = self.run_pod()
        self.provider.booting = Deferred()
        creating = self.create(id)
        self.provider.destroy_error = Unavailable("the IaaS is down")
        self.provider.booting.errback(Unavailable("no boot"))
        self.fails(creating, Unavailable)
        self.assertEqual(self.record(id).state, SandboxState.BOOTING)
        self.fails(self.create(id), Unavailable)
        self.provider.destroy_error = None
        self.do(self.world.reconciler.once(self.world.node_provider))
        self.assertVacant(id)

    def give_up(self, id: str) -> None:
        """Have a container's creation fail when its VM is up, and the VM not be destroyed."""
        real = self.provider.launch

        def launch(spec: Any) -> Any:
            launched = real(spec)
            self.world.agents[spec.sandbox_id].create_error = FailedPrecondition("not such")
            return launched

        self.provider.destroy_error = Unavailable("the IaaS is down")
        patch = self.patch(self.provider, "launch", launch)
        self.fails(self.create(id), FailedPrecondition)
        patch.restore()
        self.assertEqual(self.record(id).state, SandboxState.READY)
        self.provider.destroy_error = None

    def test_one_that_was_up_and_can_not_be_destroyed_is_tried_again_in_the_next_pass(self) -> None:
        id = self.run_pod()
        self.give_up(id)
        self.do(self.world.reconciler.once(self.world.node_provider))
        self.assertVacant(id)

    def test_and_when_another_container_is_asked_for(self) -> None:
        id = self.run_pod()
        self.give_up(id)
        self.successResultOf(self.create(id))
        self.assertEqual(len(self.provider.instances), 1)
        self.do(self.world.reconciler.once(self.world.node_provider))
        self.assertEqual(self.record(id).state, SandboxState.READY)

    def test_a_container_that_is_asked_for_while_the_former_one_is_given_up_gets_the_next_vm(self) -> None:
        id = self.run_pod()
        self.give_up(id)
        held: Deferred[None] = Deferred()
        real = self.provider.destroy
        self.patch(self.provider, "destroy", lambda vm: held.addCallback(lambda _: real(vm)))
        passing = start(self.world.reconciler.once(self.world.node_provider))
        creating = self.create(id)
        self.assertNoResult(creating)
        held.callback(None)
        self.successResultOf(passing)
        self.successResultOf(creating)
        self.assertEqual(len(self.provider.specs), 2)
        self.assertEqual(len(self.provider.instances), 1)

    def test_stopping_while_it_boots(self) -> None:
        for step in ("launching", "booting"):
            id = self.run_pod(pod(uid=step))
            held: Deferred[None] = Deferred()
            setattr(self.provider, step, held)
            creating = self.create(id)
            stopping = start(self.world.sandboxes.stop(id))
            if not held.called:
                held.callback(None)
            self.successResultOf(stopping)
            self.failureResultOf(creating, InfranetesError)
            setattr(self.provider, step, None)
            self.assertEqual(self.provider.instances, {})
            self.assertEqual(self.record(id).state, SandboxState.STOPPED)
            self.do(self.world.sandboxes.remove(id))
        self.assertNothingLeft()

    def test_a_container_that_is_given_up_while_it_boots_ends_the_boot_and_says_so(self) -> None:
        id = self.run_pod()
        self.provider.booting = Deferred()
        creating = self.create(id)
        (container,) = self.world.node.inventory.containers.values()
        self.do(self.world.containers.remove(container.id))
        self.fails(creating, Unavailable)
        sandbox = self.world.node.inventory.sandbox(id)
        self.assertIn("its container was given up", sandbox.aborted)
        self.assertVacant(id)


class KilledTests(MachineImagesTestCase):
    """The daemon is killed; the next one leaves no VM without a container."""

    def killed(self, step: str) -> str:
        """Return a pod. The daemon was killed in this step of creating its container."""
        id = self.run_pod()
        held: Deferred[None] = Deferred()
        setattr(self.provider, step, held)
        self.create(id).addErrback(lambda failure: None)
        self.world.kill()
        setattr(self.provider, step, None)
        if not held.called:
            held.callback(None)  # the request takes effect all the same
        self.world.begin()
        return id

    def test_at_each_step(self) -> None:
        for step in ("launching", "booting"):
            self.world = MachineImageNode()
            self.world.provider_ready()
            id = self.killed(step)
            self.assertEqual(self.record(id).state, SandboxState.BOOTING)
            self.world.provider_ready()
            self.assertVacant(id)
            self.successResultOf(self.create(id))
            self.assertEqual(len(self.provider.instances), 1)
            self.do(self.world.sandboxes.remove(id))
            self.assertNothingLeft()
            self.world.kill()

    def test_before_anything_was_asked_for(self) -> None:
        id = self.run_pod()
        self.world.restart()
        self.assertVacant(id)
        self.successResultOf(self.create(id))

    def test_a_container_that_is_asked_for_before_the_provider_is_back(self) -> None:
        id = self.killed("booting")
        self.fails(self.create(id), Unavailable)
        self.world.provider_ready()
        self.assertVacant(id)

    def test_a_removal_is_finished(self) -> None:
        sandbox, container = self.booted()
        self.provider.destroy_error = Unavailable("the IaaS is down")
        self.fails(start(self.world.containers.remove(container)), Unavailable)
        self.assertEqual(self.record(sandbox).state, SandboxState.READY)
        self.world.kill()
        self.provider.destroy_error = None
        self.world.begin()
        self.assertEqual(len(self.provider.instances), 1)
        self.world.provider_ready()
        self.assertVacant(sandbox)

    def test_one_that_runs_goes_on(self) -> None:
        sandbox, container = self.booted()
        self.do(self.world.containers.start(container))
        self.world.restart()
        self.assertEqual(self.record(sandbox).state, SandboxState.READY)
        self.assertEqual(self.world.node.inventory.container(container).state, ContainerState.RUNNING)
        self.assertEqual(len(self.provider.instances), 1)
