# SPDX-License-Identifier: Apache-2.0
"""The next daemon and its passes where several providers, pools, or very many pods are on the node, and where
providers hang."""

from __future__ import annotations

from typing import Any

import attrs
from twisted.internet.defer import Deferred, fail

from infranetes.machines.pool_config import PoolConfig, PoolSize
from infranetes.pods.node.hooks import PodFeature
from infranetes.pods.node.inventory import Sandbox
from infranetes.pods.reconcile import AT_A_TIME, LIST_SECONDS
from infranetes.pods.store.records import LogPosition
from infranetes.pods.store.states import ContainerState, SandboxState
from infranetes.providers.interface import Instance, InstanceState
from infranetes_common.concurrency import start
from infranetes_common.errors import Unavailable
from tests.infranetes.pods import fakes
from tests.infranetes.pods.case import ContainersTestCase, PodsTestCase
from tests.infranetes.pods.fakes import FakeNode, pod
from tests.infranetes.pods.mixed import MixedCase


def stray(id: str = "stray") -> Instance:
    return Instance(id, f"token of {id}", "s" * 32, InstanceState.RUNNING)


class LoadTests(ContainersTestCase):
    """What an earlier daemon has recorded is taken up."""

    def sandbox_again(self) -> Sandbox:
        return self.world.node.inventory.sandboxes[self.sandbox]

    def begin_with(self, **sandbox: Any) -> None:
        """Have the next daemon find the pod's record changed."""
        record = attrs.evolve(self.record(self.sandbox), **sandbox)
        self.world.kill()
        self.world.store.put_sandbox(record)
        self.world.begin()

    def test_a_log_goes_on_where_it_was_written_to(self) -> None:
        made, position = self.run_container(), LogPosition("cursor", 7, 4096)
        self.world.store.put_log(made, position)
        self.world.restart()
        self.assertEqual(self.world.node.inventory.containers[made].log_position, position)

    def test_the_timeline_says_that_the_daemon_was_started_again(self) -> None:
        self.world.restart()
        step = self.sandbox_again().timeline.steps[0]
        self.assertEqual((step.what, step.detail), ("the daemon was started again", "the pod is ready"))

    def test_containers_of_a_lost_pod_end_for_its_reason_and_what_was_begun_with_them_is_finished(
        self,
    ) -> None:
        running, removed, created = (
            self.run_container(),
            self.create(fakes.box("b")),
            self.create(fakes.box("c")),
        )
        records = [self.kept(removed).to(ContainerState.REMOVING)]
        records += [attrs.evolve(self.kept(created), state=ContainerState.CREATING)]
        self.world.kill()
        for record in records:
            self.world.store.put_container(record)
        lost = self.record(self.sandbox).to(SandboxState.LOST, message="its host failed")
        self.world.store.put_sandbox(lost)
        self.world.begin()
        (kept,) = self.world.store.contents().containers
        self.assertEqual(
            (kept.id, kept.state, kept.message), (running, ContainerState.EXITED, "its host failed")
        )

    def test_a_pod_that_is_stopped_and_never_had_a_vm_has_no_agent_to_connect_to(self) -> None:
        self.world.agents.clear()
        self.begin_with(state=SandboxState.STOPPING, instance_id="", agent_host="", agent_port=0)
        self.assertIsNone(self.sandbox_again().client)

    def test_launches_go_on_in_the_order_in_which_they_were_begun(self) -> None:
        self.world.provider.booting = Deferred()
        for name in ("first", "second", "third"):
            self.world.clock.advance(1)
            self.start(pod(name)).addErrback(lambda _: None)
        begun = [spec.sandbox_id for spec in self.world.provider.specs[1:]]
        records = list(self.world.store.contents().sandboxes)
        self.world.kill()
        for record in sorted(records, key=lambda each: -each.created_at):  # as the store may give them
            self.world.store.delete_sandbox(record.id)
            self.world.store.put_sandbox(record)
        self.world.provider.specs.clear()
        self.world.begin()
        self.world.provider_ready()
        self.assertEqual([spec.sandbox_id for spec in self.world.provider.specs], begun)

    def test_the_removal_of_a_container_with_its_pods_stop_waits_for_its_log(self) -> None:
        made = self.run_container()
        removing = self.kept(made).to(ContainerState.REMOVING)
        self.world.store.put_container(removing)
        self.begin_with(state=SandboxState.STOPPING)
        self.world.logs.slow = Deferred()
        self.world.provider_ready()
        self.assertEqual(len(self.world.store.contents().containers), 1)
        self.world.logs.slow.callback(None)
        self.assertEqual(self.world.store.contents().containers, ())

    def test_what_has_to_end_is_ended_though_the_provider_can_not_list_its_vms(self) -> None:
        self.begin_with(state=SandboxState.ABANDONED)
        self.patch(self.world.provider, "list", lambda: fail(Unavailable("throttled")))
        self.world.provider_ready()
        self.assertNothingLeft()


class ManyTests(PodsTestCase):
    def test_very_many_records_are_taken_up_a_few_in_each_turn(self) -> None:
        pods, turns = AT_A_TIME + 1, []
        for number in range(pods):
            self.run_pod(pod(str(number)))

        async def breathe() -> None:
            turns.append(len(list(self.world.node.inventory)))

        self.patch(fakes, "_breathe", breathe)
        self.world.kill()
        self.world.begin()
        self.assertEqual(turns, [AT_A_TIME, pods], "to read them, and to take them over")


class HangingTests(PodsTestCase):
    """A provider does not answer."""

    def test_a_list_is_waited_for_no_longer_than_a_while(self) -> None:
        lists: list[Deferred[Any]] = []

        def hang() -> Deferred[Any]:
            lists.append(Deferred())
            return lists[-1]

        self.patch(self.world.provider, "list", hang)
        self.world.wait(self.world.times.sweep)
        self.assertEqual(len(lists), 1)
        self.world.wait(LIST_SECONDS + self.world.times.sweep, step=1.0)
        self.assertEqual(len(lists), 2)

    def test_the_end_of_a_vm_on_no_record_is_waited_for_no_longer_than_a_while(self) -> None:
        asked: list[str] = []

        def hang(instance_id: str) -> Deferred[None]:
            asked.append(instance_id)
            return Deferred()

        self.patch(self.world.provider, "destroy", hang)
        for name in ("one", "other"):
            self.world.provider.instances[name] = stray(name)
        self.do(self.world.reconciler.once(self.world.node_provider))
        second = start(self.world.reconciler.once(self.world.node_provider))
        self.world.wait(2 * self.world.times.destroy + 1, step=1.0)
        self.successResultOf(second)
        self.assertEqual(set(asked), {"one", "other"})

    def test_a_vm_that_is_neither_listed_nor_looked_up_keeps_no_other_from_being_compared(self) -> None:
        first, second = self.run_pod(), self.run_pod(pod("second"))
        instances = {one.sandbox_id: one for one in self.world.provider.instances.values()}
        lost = attrs.evolve(instances[second], state=InstanceState.ENDED, detail="power")
        self.world.provider.instances = {lost.id: lost}
        self.patch(self.world.provider, "get", lambda _: fail(Unavailable("throttled")))
        self.do(self.world.reconciler.once(self.world.node_provider))
        states = [self.record(id).state for id in (first, second)]
        self.assertEqual(states, [SandboxState.READY, SandboxState.LOST])


class PoolTests(PodsTestCase):
    """VMs of the pool are compared with the list, too, and are on record."""

    def make_world(self) -> FakeNode:
        return FakeNode(pool=PoolConfig(sizes=(PoolSize(count=1),)))

    def test_they_are_no_orphans(self) -> None:
        (waiting,) = self.world.provider.instances
        for _ in range(3):
            self.do(self.world.reconciler.once(self.world.node_provider))
        self.assertEqual(list(self.world.provider.instances), [waiting])
        self.assertEqual(self.do(self.world.reconciler.orphans()), ([], []))

    def test_one_that_the_provider_says_has_ended_is_replaced(self) -> None:
        ((id, instance),) = self.world.provider.instances.items()
        self.world.provider.instances[id] = attrs.evolve(instance, state=InstanceState.ENDED)
        self.do(self.world.reconciler.once(self.world.node_provider))
        (other,) = self.world.provider.instances.values()
        self.assertNotEqual(other.id, id)
        self.assertIs(other.state, InstanceState.RUNNING)


class OrphanTests(PodsTestCase):
    """What `infranetes-ctl orphans` lists, and may have ended."""

    def test_only_vms_on_no_record_are_listed(self) -> None:
        self.run_pod()
        self.world.provider.instances["stray"] = stray()
        found, troubles = self.do(self.world.reconciler.orphans())
        self.assertEqual([(one.name, vm.id) for one, vm in found], [("fake", "stray")])
        self.assertEqual(troubles, [])

    def test_an_error_of_ours_is_not_taken_for_an_answer(self) -> None:
        self.patch(self.world.provider, "list", lambda: fail(ZeroDivisionError("ours")))
        self.failureResultOf(start(self.world.reconciler.orphans()), ZeroDivisionError)


class SeveralProvidersTests(MixedCase):
    """Each provider's start and passes are about its own pods."""

    def test_the_start_of_one_touches_no_pod_of_another(self) -> None:
        id = self.east_pod()
        stopping = self.record(id).to(SandboxState.STOPPING)
        self.world.kill()
        self.world.store.put_sandbox(stopping)
        self.world.begin()
        self.world.provider_ready()
        sandbox = self.world.node.inventory.sandboxes[id]
        self.assertIsNone(sandbox.stopping)
        self.world.east_ready()
        self.assertIs(sandbox.state, SandboxState.STOPPED)

    def test_a_pass_over_one_asks_for_no_vm_of_another(self) -> None:
        self.east_pod()
        asked = self.world.east.calls
        get = self.world.east.get
        looked: list[str] = []

        def counted(instance_id: str) -> Deferred[Instance]:
            looked.append(instance_id)
            return get(instance_id)

        self.patch(self.world.east, "get", counted)
        before = list(asked)
        self.do(self.world.reconciler.once(self.world.node_provider))
        self.assertEqual((looked, asked), ([], before))

    def test_the_features_are_swept_once_in_each_pass(self) -> None:
        swept: list[float] = []

        class Feature(PodFeature):
            name = "one that is swept"

            async def sweep(self) -> None:
                swept.append(world.clock.seconds())

        world = self.world
        world.join(Feature())
        world.wait(3 * world.times.sweep)
        self.assertEqual(len(swept), 3)

    def test_orphans_are_those_of_all_and_who_can_not_be_asked_is_named_once(self) -> None:
        self.world.east.instances["stray"] = stray()
        error = Unavailable("provider fake: throttled")
        patch = self.patch(self.world.provider, "list", lambda: fail(error))
        found, troubles = self.do(self.world.reconciler.orphans())
        self.assertEqual([(one.name, vm.id) for one, vm in found], [("east", "stray")])
        self.assertEqual(troubles, ["provider fake: throttled"])
        error = Unavailable("throttled")
        _, troubles = self.do(self.world.reconciler.orphans())
        self.assertEqual(troubles, ["provider fake can't be asked: throttled"])
        patch.restore()
