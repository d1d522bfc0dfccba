# SPDX-License-Identifier: Apache-2.0
"""The next daemon after a kill, and the reconciliation with the provider's VMs."""

from __future__ import annotations

from typing import Any

import attrs
from twisted.internet.defer import Deferred, fail, succeed

from infranetes.pods.node.hooks import PodFeature
from infranetes.pods.sandboxes.stop import AGENT_SECONDS
from infranetes.pods.store.states import ContainerState, SandboxState
from infranetes.pods.vm import listing
from infranetes.providers.interface import Instance, InstanceState
from infranetes_common.concurrency import start
from infranetes_common.errors import Unavailable
from infranetes_common.wire import cri
from tests.infranetes.pods.case import ContainersTestCase, PodsTestCase
from tests.infranetes.pods.fakes import box, pod


class RestartTests(ContainersTestCase):
    """A daemon that is killed and started again."""

    def test_pods_are_as_they_were(self) -> None:
        made = self.run_container()
        before = self.world.store.contents()
        calls = list(self.agent.calls)
        self.world.restart()
        self.assertEqual(self.world.store.contents(), before)
        self.assertEqual(self.agent.calls, calls)
        self.assertEqual(self.world.node.inventory.containers[made].state, ContainerState.RUNNING)
        self.assertIn(made, self.world.logs.ensured)
        self.do(self.world.containers.exec_sync(made, ["ls"], 0, None))

    def test_it_serves_before_the_provider_and_the_agents_have_answered(self) -> None:
        made = self.run_container()
        self.agent.silent = True
        self.world.kill()
        self.world.begin()
        (container,) = self.world.listing.containers()
        self.assertEqual((container.id, listing.shown_state(container)), (made, cri.CONTAINER_RUNNING))
        self.assertEqual(len(self.world.listing.sandboxes()), 1)

    def test_what_ended_meanwhile_has_ended(self) -> None:
        made = self.run_container()
        self.world.kill()
        self.agent.become(made, cri.CONTAINER_EXITED, finished_at=8, exit_code=1)
        self.world.restart()
        self.assertEqual((self.kept(made).state, self.kept(made).exit_code), (ContainerState.EXITED, 1))
        self.assertIn(made, self.world.logs.ensured)

    def test_what_was_started_is_not_shown_as_never_started(self) -> None:
        made = self.create()
        self.do(self.world.containers.start(made))
        for state, shown in (
            (ContainerState.RUNNING, cri.CONTAINER_RUNNING),
            (ContainerState.STARTING, cri.CONTAINER_UNKNOWN),
        ):
            self.world.kill()
            self.world.store.put_container(attrs.evolve(self.kept(made), state=state))
            self.agent.silent = True
            self.world.begin()
            (container,) = self.world.listing.containers()
            self.assertEqual(listing.shown_state(container), shown)
            self.agent.silent = False
            self.world.restart()
            (container,) = self.world.listing.containers()
            self.assertEqual(listing.shown_state(container), cri.CONTAINER_RUNNING)

    def test_a_vm_that_ended_meanwhile_is_lost(self) -> None:
        made = self.run_container()
        self.world.kill()
        self.world.provider.instances.clear()
        self.agent.away = True
        self.world.restart()
        self.assertEqual(self.record(self.sandbox).state, SandboxState.LOST)
        self.assertEqual(self.kept(made).state, ContainerState.EXITED)

    def test_a_vm_that_ended_and_is_still_listed_is_lost(self) -> None:
        self.world.kill()
        (instance,) = self.world.provider.instances.values()
        self.world.provider.instances[instance.id] = attrs.evolve(
            instance, state=InstanceState.ENDED, detail="power"
        )
        self.world.restart()
        self.assertIn("power", self.record(self.sandbox).message)

    def test_a_creation_that_the_agent_had_finished_is_kept(self) -> None:
        made = self.create()
        interrupted = attrs.evolve(self.kept(made), state=ContainerState.CREATING, claimed=False)
        self.world.kill()
        self.world.store.put_container(interrupted)
        self.world.restart()
        self.assertEqual(self.kept(made).state, ContainerState.CREATED)
        self.assertEqual(self.create(), made)

    def test_a_creation_that_the_agent_does_not_know_never_was(self) -> None:
        made = self.create()
        interrupted = attrs.evolve(self.kept(made), state=ContainerState.CREATING, claimed=False)
        self.world.kill()
        self.world.store.put_container(interrupted)
        self.agent.containers.clear()
        self.world.restart()
        self.assertEqual(self.world.store.contents().containers, ())
        self.create()

    def test_removals_are_finished(self) -> None:
        both = [self.create(), self.create(box("other"))]
        removing = [self.kept(made).to(ContainerState.REMOVING) for made in both]
        self.world.kill()
        for record in removing:
            self.world.store.put_container(record)
        self.world.restart()
        self.assertEqual(self.world.store.contents().containers, ())
        self.assertEqual(self.agent.containers, {})

    def test_a_stop_is_finished(self) -> None:
        made = self.run_container()
        stopping = self.record(self.sandbox).to(SandboxState.STOPPING)
        self.world.kill()
        self.world.store.put_sandbox(stopping)
        self.world.restart()
        self.assertEqual(self.record(self.sandbox).state, SandboxState.STOPPED)
        self.assertEqual(self.world.provider.instances, {})
        self.assertEqual(self.kept(made).exit_code, 143)

    def test_a_stop_waits_for_no_agent_whose_vm_is_gone_or_has_ended(self) -> None:
        (instance,) = self.world.provider.instances.values()
        for left in ({}, {instance.id: attrs.evolve(instance, state=InstanceState.ENDED)}):
            stopping = attrs.evolve(self.record(self.sandbox), state=SandboxState.STOPPING)
            self.world.kill()
            self.world.store.put_sandbox(stopping)
            self.world.provider.instances = dict(left)
            self.agent.silent = True
            began = self.world.clock.seconds()
            self.world.restart()
            self.assertEqual(self.world.clock.seconds(), began)
            self.assertEqual(self.record(self.sandbox).state, SandboxState.STOPPED)
            self.assertEqual(self.world.provider.instances, {})

    def test_a_stop_gives_an_agent_time_whose_vm_may_be_there(self) -> None:
        stopping = self.record(self.sandbox).to(SandboxState.STOPPING)
        self.world.kill()
        self.world.store.put_sandbox(stopping)
        self.agent.silent = True
        self.patch(self.world.provider, "get", lambda _: fail(Unavailable("the cloud is away")))
        self.world.restart()
        self.assertEqual(self.record(self.sandbox).state, SandboxState.STOPPING)
        self.world.clock.advance(AGENT_SECONDS)
        self.assertEqual(self.record(self.sandbox).state, SandboxState.STOPPED)

    def test_with_a_stop_the_removal_and_the_creation_of_a_container_are_finished(self) -> None:
        removed, created = self.run_container(), self.create(box("created"))
        stopping = self.record(self.sandbox).to(SandboxState.STOPPING)
        containers = [
            self.kept(removed).to(ContainerState.REMOVING),
            attrs.evolve(self.kept(created), state=ContainerState.CREATING),
        ]
        self.world.kill()
        self.world.store.put_sandbox(stopping)
        for container in containers:
            self.world.store.put_container(container)
        self.agent.away = True
        self.world.restart()
        self.world.wait(6)
        self.assertEqual(self.record(self.sandbox).state, SandboxState.STOPPED)
        self.assertEqual(self.world.store.contents().containers, ())

    def test_an_end_of_a_failed_launch_is_finished(self) -> None:
        launching = attrs.evolve(self.record(self.sandbox), state=SandboxState.ABANDONED)
        self.world.kill()
        self.world.store.put_sandbox(launching)
        self.world.restart()
        self.assertNothingLeft()

    def test_containers_of_a_stopped_sandbox_stay_as_they_ended(self) -> None:
        made = self.run_container()
        self.do(self.world.sandboxes.stop(self.sandbox))
        before = self.kept(made)
        self.world.restart()
        self.assertEqual(self.kept(made), before)
        self.do(self.world.sandboxes.remove(self.sandbox))
        self.assertNothingLeft()

    def test_an_unreachable_agent_is_unknown_after_a_while_and_hinders_no_other(self) -> None:
        made = self.run_container()
        self.agent.away = True
        other = self.run_pod(pod("other"))
        self.world.restart()
        self.world.wait(4)
        inventory = self.world.node.inventory
        self.assertEqual(listing.shown_state(inventory.containers[made]), cri.CONTAINER_RUNNING)
        self.world.wait(2)
        self.assertEqual(listing.shown_state(inventory.containers[made]), cri.CONTAINER_UNKNOWN)
        self.assertTrue(self.watch(other).live)
        self.agent.away = False
        self.world.wait(20)
        self.assertEqual(listing.shown_state(inventory.containers[made]), cri.CONTAINER_RUNNING)


class InterruptedLaunchTests(PodsTestCase):
    """A daemon that is killed while it launches."""

    def interrupt(self, **changes: Any) -> str:
        """Begin a launch, record it only this far, and start the next daemon."""
        self.world.provider.booting = Deferred()
        self.start()
        (sandbox,) = self.world.node.inventory
        record = attrs.evolve(self.record(sandbox.id), **changes)
        self.world.kill()
        self.world.store.put_sandbox(record)
        self.world.provider.booting = None
        return sandbox.id

    def test_it_goes_on_with_the_same_vm(self) -> None:
        id = self.interrupt()
        self.world.restart()
        self.assertEqual(self.record(id).state, SandboxState.READY)
        self.assertEqual(len(self.world.provider.instances), 1)
        self.assertEqual(len({spec.token for spec in self.world.provider.specs}), 1)
        self.assertEqual(self.run_pod(), id)

    def test_also_when_the_providers_answer_was_not_recorded(self) -> None:
        id = self.interrupt(instance_id="")
        self.world.restart()
        self.assertEqual(self.record(id).state, SandboxState.READY)
        self.assertEqual(len(self.world.provider.instances), 1)

    def test_also_when_nothing_was_asked_for_yet(self) -> None:
        id = self.interrupt(instance_id="")
        self.world.provider.instances.clear()
        self.world.restart()
        self.assertEqual(self.record(id).state, SandboxState.READY)

    def test_kubelet_joins_it_before_the_provider_has_started(self) -> None:
        id = self.interrupt()
        self.world.begin()
        call = self.start()
        self.assertNoResult(call)
        self.world.provider_ready()
        self.assertEqual(self.successResultOf(call), id)

    def test_it_is_ended_when_nobody_asks_for_it(self) -> None:
        self.interrupt()
        self.world.restart()
        self.world.wait(self.world.times.desertion + 1)
        self.assertNothingLeft()

    def test_it_is_undone_when_it_fails(self) -> None:
        self.interrupt(instance_id="")
        self.world.provider.instances.clear()
        self.world.provider.launch_error = Unavailable("down")
        self.world.restart()
        self.assertNothingLeft()


class PassTests(PodsTestCase):
    """VMs and records that disagree."""

    def stray(self) -> str:
        made = Instance("stray", "t" * 32, "s" * 32, InstanceState.RUNNING)
        self.world.provider.instances[made.id] = made
        return made.id

    def test_a_vm_that_no_record_knows_is_destroyed_in_the_second_pass(self) -> None:
        stray = self.stray()
        self.do(self.world.reconciler.once(self.world.node_provider))
        self.assertIn(stray, self.world.provider.instances)
        self.do(self.world.reconciler.once(self.world.node_provider))
        self.assertNotIn(stray, self.world.provider.instances)

    def test_that_of_a_pod_that_is_stopped_is_destroyed_likewise(self) -> None:
        id = self.run_pod()
        (instance,) = self.world.provider.instances.values()
        self.do(self.world.sandboxes.stop(id))
        self.world.provider.instances[instance.id] = instance  # made once more, after its end
        for left in (1, 0):
            self.do(self.world.reconciler.once(self.world.node_provider))
            self.assertEqual(len(self.world.provider.instances), left)

    def test_what_the_list_says_of_a_pods_vm_is_known_from_then_on(self) -> None:
        id = self.run_pod()
        [(name, instance)] = self.world.provider.instances.items()
        self.world.provider.instances[name] = attrs.evolve(instance, zone="z")
        self.do(self.world.reconciler.once(self.world.node_provider))
        known = self.world.node.inventory.sandboxes[id].machine.instance
        self.assertEqual(known and known.zone, "z")

    def test_one_that_is_seen_in_two_passes_apart_is_left_alone(self) -> None:
        stray = self.stray()
        self.do(self.world.reconciler.once(self.world.node_provider))
        instance = self.world.provider.instances.pop(stray)
        self.do(self.world.reconciler.once(self.world.node_provider))
        self.world.provider.instances[stray] = instance
        self.do(self.world.reconciler.once(self.world.node_provider))
        self.assertIn(stray, self.world.provider.instances)

    def test_our_own_are_left_alone_also_while_they_are_launched(self) -> None:
        self.run_pod()
        self.world.provider.booting = Deferred()
        launch = self.start(pod("other"))
        for _ in range(3):
            self.do(self.world.reconciler.once(self.world.node_provider))
        self.world.provider.booting.callback(None)
        self.successResultOf(launch)
        self.assertEqual(len(self.world.provider.instances), 2)

    def test_one_that_can_not_be_destroyed_is_tried_again(self) -> None:
        stray = self.stray()
        self.world.provider.destroy_error = Unavailable("down")
        for _ in range(3):
            self.do(self.world.reconciler.once(self.world.node_provider))
        self.world.provider.destroy_error = None
        self.do(self.world.reconciler.once(self.world.node_provider))
        self.assertNotIn(stray, self.world.provider.instances)

    def test_one_that_the_list_still_shows_is_not_destroyed_in_every_pass(self) -> None:
        """A cloud's list lags behind: a VM that was destroyed is given a pass to leave it."""
        self.stray()
        lagging = list(self.world.provider.instances.values())
        self.patch(self.world.provider, "list", lambda: succeed(lagging))
        destroyed = []
        for _ in range(5):
            self.do(self.world.reconciler.once(self.world.node_provider))
            destroyed.append([call for call, _ in self.world.provider.calls].count("destroy"))
        self.assertEqual(destroyed, [0, 1, 1, 2, 2])

    def test_each_feature_is_swept_in_each_pass_whatever_fails(self) -> None:
        swept: list[str] = []

        class Feature(PodFeature):
            def __init__(self, name: str, error: Exception) -> None:
                self.name = name
                self.error = error

            async def sweep(self) -> None:
                swept.append(self.name)
                raise self.error

        self.world.join(Feature("a", Unavailable("nobody answers")))
        self.world.join(Feature("b", ZeroDivisionError()))
        self.world.join(Feature("c", Unavailable("nobody answers")))
        self.world.wait(self.world.times.sweep * 2)
        self.assertEqual(swept, [*"abc"] * 2)
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 2)

    def test_host_ports_and_tunnels_are_compared_with_the_records_too(self) -> None:
        id = self.run_pod(pod(port_mappings=[cri.PortMapping(host_port=8080, container_port=80)]))
        self.world.table.ports = {}  # somebody else's doing
        self.world.wait(self.world.times.sweep)
        self.assertEqual(list(self.world.table.ports.values()), [self.record(id).address])

    def test_a_daemon_that_stops_ends_the_pass_that_is_under_way(self) -> None:
        held: Deferred[object] = Deferred()
        listed: list[Deferred[object]] = []

        def listing() -> Deferred[Any]:
            listed.append(held)
            return held

        self.patch(self.world.provider, "list", listing)
        self.world.wait(self.world.times.sweep)
        self.assertEqual(len(listed), 1)
        self.world.stop()
        self.world.wait(3 * self.world.times.sweep)
        self.assertEqual(len(listed), 1)

    def test_passes_go_on_after_one_that_failed(self) -> None:
        stray = self.stray()
        real = self.world.provider.list

        def broken() -> Any:
            raise errors.pop()

        errors = [Unavailable("down"), ZeroDivisionError("ours")]
        self.world.provider.list = broken  # type: ignore[method-assign]
        self.world.wait(2 * self.world.times.sweep + 1)
        self.assertEqual((errors, len(self.flushLoggedErrors(ZeroDivisionError))), ([], 1))
        self.world.provider.list = real  # type: ignore[method-assign]
        self.world.wait(self.world.times.sweep * 3)
        self.assertNotIn(stray, self.world.provider.instances)

    def test_a_vm_that_is_missing_from_the_list_alone_is_not_lost(self) -> None:
        id = self.run_pod()
        self.world.provider.list = lambda: start(_nothing())  # type: ignore[method-assign]
        for _ in range(3):
            self.do(self.world.reconciler.once(self.world.node_provider))
        self.assertEqual(self.record(id).state, SandboxState.READY)


class ListTests(ContainersTestCase):
    """A list never waits for the slowest VM."""

    def refresh(self) -> Deferred[None]:
        """Wait for agents as a list does."""
        return start(self.world.listing.refresh(self.world.node.inventory))

    def test_live_views_are_waited_for_by_nobody(self) -> None:
        self.run_container()
        self.successResultOf(self.refresh())

    def test_one_moment_once_after_a_loss(self) -> None:
        made = self.run_container()
        self.agent.silent = True
        self.agent.go_away()
        self.agent.away = False
        self.world.wait(0.5)
        first = self.refresh()
        self.assertNoResult(first)
        self.world.wait(self.world.times.listing + 0.25)
        self.successResultOf(first)
        self.successResultOf(self.refresh())
        container = self.world.node.inventory.containers[made]
        self.assertEqual(listing.shown_state(container), cri.CONTAINER_RUNNING)
        self.world.wait(6)
        self.assertEqual(listing.shown_state(container), cri.CONTAINER_UNKNOWN)
        self.assertTrue(self.watch(self.sandbox).unreachable)

    def test_an_agent_that_only_restarts_is_never_unknown(self) -> None:
        """kubelet kills and restarts containers that are UNKNOWN."""
        made = self.run_container()
        container = self.world.node.inventory.containers[made]
        self.agent.go_away()
        for _ in range(12):
            self.world.wait(0.25)
            self.assertEqual(listing.shown_state(container), cri.CONTAINER_RUNNING)
        self.agent.away = False
        self.world.wait(4)
        self.assertTrue(self.watch(self.sandbox).live)

    def test_what_has_ended_is_never_unknown(self) -> None:
        made = self.run_container()
        self.do(self.world.containers.stop(made, 0))
        self.agent.go_away()
        self.world.wait(10)
        container = self.world.node.inventory.containers[made]
        self.assertEqual(listing.shown_state(container), cri.CONTAINER_EXITED)


async def _nothing() -> list[Any]:
    return []
