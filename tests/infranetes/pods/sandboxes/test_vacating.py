# SPDX-License-Identifier: Apache-2.0
"""A VM that is its pod's container is destroyed with it: in what order, how often, what happens second."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred

from infranetes.pods.node.hooks import PodFeature
from infranetes.pods.node.inventory import Sandbox
from infranetes.pods.store.states import SandboxState
from infranetes_common.concurrency import start
from infranetes_common.errors import FailedPrecondition, Unavailable
from tests.infranetes.pods.fakes import box
from tests.infranetes.pods.sandboxes.test_machine_images import MachineImagesTestCase


class VacateCase(MachineImagesTestCase):
    def sandbox(self, id: str) -> Sandbox:
        return self.world.node.inventory.sandboxes[id]

    def destructions(self) -> int:
        return [call for call, _ in self.provider.calls].count("destroy")

    def hold_destructions(self) -> Deferred[None]:
        """Have VMs that are destroyed be gone when this fires."""
        held: Deferred[None] = Deferred()
        destroy = self.provider._destroy

        async def slowly(instance_id: str) -> None:
            waiting: Deferred[None] = Deferred()
            held.addCallback(waiting.callback)
            await waiting
            await destroy(instance_id)

        self.patch(self.provider, "_destroy", slowly)
        return held

    def refused(self, id: str, words: str) -> None:
        """Have a boot fail so."""
        self.provider.launch_error = Unavailable(words)
        self.assertIn(words, self.fails(self.create(id), Unavailable))
        self.provider.launch_error = None


class OrderTests(VacateCase):
    def test_the_features_are_told_before_the_vm_is_destroyed_and_free_what_it_had_after(self) -> None:
        seen: list[tuple[str, int]] = []

        class Feature(PodFeature):
            name = "one that looks"

            def disconnected(self, sandbox: Sandbox) -> None:
                seen.append(("disconnected", len(provider.instances)))

            async def vm_destroyed(self, sandbox: Sandbox) -> None:
                seen.append(("destroyed", len(provider.instances)))

        provider = self.provider
        _, container = self.booted()
        self.world.join(Feature())
        self.do(self.world.containers.remove(container))
        self.assertEqual(seen, [("disconnected", 1), ("destroyed", 0)])

    def test_a_creation_that_fails_is_answered_once_the_vm_is_destroyed(self) -> None:
        id = self.run_pod()
        booting = self.provider.booting = Deferred()
        creating = self.create(id)
        held = self.hold_destructions()
        booting.errback(Unavailable("no boot"))
        self.assertNoResult(creating)
        held.callback(None)
        self.fails(creating, Unavailable)
        self.assertVacant(id)

    def test_no_vm_is_asked_for_before_its_boot_is_on_the_disk(self) -> None:
        id = self.run_pod()
        on_disk: Deferred[None] = Deferred()
        put = self.world.store.put_sandbox

        def slowly(record: Any) -> Deferred[None]:
            return on_disk.addCallback(lambda _: put(record)) if not on_disk.called else put(record)

        self.patch(self.world.store, "put_sandbox", slowly)
        creating = self.create(id)
        self.assertEqual(self.provider.calls, [])
        on_disk.callback(None)
        self.successResultOf(creating)


class SecondTests(VacateCase):
    def test_however_many_want_its_end_it_is_destroyed_once(self) -> None:
        _, container = self.booted()
        held = self.hold_destructions()
        removals = [start(self.world.containers.remove(container)) for _ in range(2)]
        passes = [start(self.world.reconciler.once(self.world.node_provider)) for _ in range(2)]
        held.callback(None)
        for one in (*removals, *passes):
            self.successResultOf(one)
        self.assertEqual(self.destructions(), 1)

    def test_a_stop_while_it_boots_waits_for_what_undoes_that(self) -> None:
        id = self.run_pod()
        self.provider.booting = Deferred()
        creating = self.create(id)
        held = self.hold_destructions()
        stopping = start(self.world.sandboxes.stop(id))
        self.assertIs(self.sandbox(id).state, SandboxState.BOOTING)
        held.callback(None)
        self.successResultOf(stopping)
        self.fails(creating, Unavailable)
        self.assertEqual((self.destructions(), self.record(id).state), (1, SandboxState.STOPPED))

    def test_a_pod_that_is_stopped_meanwhile_is_never_recorded_as_one_that_may_boot_again(self) -> None:
        id, container = self.booted()
        held = self.hold_destructions()
        removing = start(self.world.containers.remove(container))
        stopping = start(self.world.sandboxes.stop(id))
        states: list[SandboxState] = []
        put = self.world.store.put_sandbox

        def noted(record: Any) -> Deferred[None]:
            states.append(record.state)
            return put(record)

        self.patch(self.world.store, "put_sandbox", noted)
        held.callback(None)
        self.successResultOf(stopping)
        self.successResultOf(removing)
        self.assertEqual(states, [SandboxState.STOPPED])

    def test_one_that_a_killed_daemon_left_is_tried_again_in_each_pass(self) -> None:
        id = self.run_pod()
        self.provider.booting = Deferred()
        self.create(id).addErrback(lambda failure: None)
        self.provider.destroy_error = Unavailable("the IaaS is down")
        self.world.restart()
        self.assertIs(self.record(id).state, SandboxState.BOOTING)
        self.provider.destroy_error = None
        self.do(self.world.reconciler.once(self.world.node_provider))
        self.assertVacant(id)

    def refuse_container(self) -> None:
        """Have the agent of the next VM refuse its container."""
        launch = self.provider.launch

        def refusing(spec: Any) -> Any:
            launched = launch(spec)
            self.world.agents[spec.sandbox_id].create_error = FailedPrecondition("not such a machine")
            patch.restore()
            return launched

        patch = self.patch(self.provider, "launch", refusing)

    def test_one_that_is_removed_while_its_failure_is_undone_fails_as_it_did(self) -> None:
        id = self.run_pod()
        self.refuse_container()
        held = self.hold_destructions()
        creating = self.create(id)
        (container,) = self.world.node.inventory.containers
        removing = start(self.world.containers.remove(container))
        self.assertNoResult(removing)
        self.assertNoResult(creating)
        held.callback(None)
        self.successResultOf(removing)
        self.assertIn("not such a machine", self.fails(creating, FailedPrecondition))
        self.assertVacant(id)

    def test_a_vm_whose_container_can_not_be_made_is_nobody_elses_meanwhile(self) -> None:
        id = self.run_pod()
        self.refuse_container()
        released: Deferred[None] = Deferred()
        self.patch(self.world.node.features, "release", lambda container: released)
        first = self.create(id)
        self.assertNoResult(first)
        self.world.agents[id].create_error = None
        second = self.create(id, box("second"))
        second.addErrback(lambda failure: failure.trap(FailedPrecondition))
        released.callback(None)
        self.fails(first, FailedPrecondition)
        vms = len(self.provider.instances)
        self.assertEqual(len(self.world.store.contents().containers), vms, "each of them has its VM")
        if not vms:
            self.successResultOf(self.create(id, box("third")))


class AgainTests(VacateCase):
    """Another boot is told from the former one."""

    def test_a_boot_that_succeeds_has_no_trouble_of_the_former_one(self) -> None:
        id = self.run_pod()
        self.refused(id, "no capacity")
        self.assertEqual(self.sandbox(id).trouble, "no capacity")
        self.successResultOf(self.create(id))
        self.assertEqual(self.sandbox(id).trouble, "")

    def test_one_that_fails_after_another_was_given_up_says_why_it_failed_itself(self) -> None:
        id = self.run_pod()
        self.provider.booting = Deferred()
        creating = self.create(id)
        (container,) = self.world.node.inventory.containers
        self.do(self.world.containers.remove(container))
        self.fails(creating, Unavailable)
        self.assertEqual(self.world.images.checked, [], "the image is not to blame")
        self.provider.booting = None
        self.refused(id, "no capacity")
        self.assertEqual(self.sandbox(id).aborted, "")
        self.assertEqual(len(self.world.images.checked), 1)

    def test_one_whose_vm_ended_stays_so_though_its_container_is_given_up_then(self) -> None:
        id = self.run_pod()
        self.provider.booting = Deferred()
        creating = self.create(id)
        held = self.hold_destructions()
        (instance,) = self.provider.instances
        self.provider.end(instance, "its kernel panicked")
        (container,) = self.world.node.inventory.containers
        removing = start(self.world.containers.remove(container))
        held.callback(None)
        self.successResultOf(removing)
        self.fails(creating, Unavailable)
        self.assertIn("its kernel panicked", self.sandbox(id).aborted)

    def test_one_that_the_stop_of_its_pod_ends_says_that_to_whoever_booted_it(self) -> None:
        id = self.run_pod()
        put = self.world.store.put_sandbox
        on_disk: Deferred[None] = Deferred()
        patch = self.patch(
            self.world.store, "put_sandbox", lambda one: on_disk.addCallback(lambda _: put(one))
        )
        image = self.world.images.image
        booting = start(self.world.node.machine_images.boot(self.sandbox(id), image, box()))
        stopping = start(self.world.sandboxes.stop(id))
        patch.restore()
        on_disk.callback(None)
        self.successResultOf(stopping)
        self.assertIn("it was stopped while its VM was being booted", self.fails(booting, Unavailable))

    def test_before_the_provider_has_started_the_answer_is_what_it_waits_for(self) -> None:
        id = self.run_pod()
        self.world.kill()
        self.world.begin()
        self.world.node_provider.trouble = "building the template"
        self.assertIn("building the template", self.fails(self.create(id), Unavailable))
        self.assertIs(self.record(id).state, SandboxState.VACANT)

    def test_a_daemon_that_stops_looks_for_no_image(self) -> None:
        id = self.run_pod()
        self.provider.booting = Deferred()
        self.create(id).addErrback(lambda failure: None)
        self.world.stop()
        self.assertEqual(self.world.images.checked, [])
