# SPDX-License-Identifier: Apache-2.0
"""Running, stopping and removing sandboxes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import attrs
from twisted.internet.defer import Deferred

from infranetes.pods.node.hooks import PodFeature
from infranetes.pods.node.inventory import Container, Sandbox
from infranetes.pods.node.node_providers import NodeProvider
from infranetes.pods.store.states import ContainerState, SandboxState
from infranetes.pods.vm.vm_size import size_of
from infranetes.providers.interface import Instance, InstanceState, Size
from infranetes_common.concurrency import start
from infranetes_common.errors import (
    AlreadyExists,
    DeadlineExceeded,
    FailedPrecondition,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from infranetes_common.wire import cri
from tests.infranetes.pods.case import PodsTestCase
from tests.infranetes.pods.fakes import box, pod


class RunTests(PodsTestCase):
    """RunPodSandbox."""

    def test_a_ready_sandbox_has_a_vm_a_configured_agent_and_a_record(self) -> None:
        id = self.run_pod(pod(hostname="web-0"))
        record = self.record(id)
        self.assertEqual(record.state, SandboxState.READY)
        self.assertEqual(record.address, "10.0.0.1")
        self.assertEqual(record.agent_host, "10.0.0.1")
        self.assertEqual(self.world.agents[id].configured, [pod(hostname="web-0")])
        spec = self.world.provider.specs[0]
        self.assertEqual((spec.sandbox_id, spec.cluster, spec.node), (id, "c", "n"))
        self.assertEqual(spec.identity.hostname, "web-0")
        self.assertRegex(id, "^[0-9a-f]{32}$")

    def test_the_record_is_there_before_the_vm_is_asked_for(self) -> None:
        seen: list[Any] = []
        real = self.world.provider.launch

        def launch(spec: Any) -> Any:
            seen.extend(self.world.store.contents().sandboxes)
            return real(spec)

        self.world.provider.launch = launch  # type: ignore[method-assign]
        id = self.run_pod()
        self.assertEqual([(one.id, one.state) for one in seen], [(id, SandboxState.LAUNCHING)])
        self.assertEqual(seen[0].token, self.world.provider.specs[0].token)

    def test_no_vm_is_asked_for_when_the_record_can_not_be_written(self) -> None:
        self.world.store.failing = ResourceExhausted("full")
        self.failureResultOf(self.start(), ResourceExhausted)
        self.assertEqual(self.world.provider.calls, [])
        self.world.store.failing = None
        self.run_pod()

    def test_no_key_is_ever_in_the_store(self) -> None:
        self.run_pod()
        rows = list(self.world.store.connection.iterdump())
        self.assertFalse([row for row in rows if "'key'" in row or "certificate of" in row])

    def test_the_second_call_for_a_launch_under_way_joins_it(self) -> None:
        self.world.provider.booting = Deferred()
        first, second = self.start(), self.start()
        self.assertNoResult(second)
        self.world.provider.booting.callback(None)
        self.assertEqual(self.successResultOf(first), self.successResultOf(second))
        self.assertEqual(len(self.world.provider.specs), 1)

    def test_a_caller_that_goes_away_leaves_the_launch_to_the_next(self) -> None:
        """kubelet gives up after 4 minutes and retries the same attempt."""
        self.world.provider.booting = Deferred()
        first = self.start()
        first.cancel()
        self.failureResultOf(first)
        self.world.wait(240)
        second = self.start()
        self.world.provider.booting.callback(None)
        id = self.successResultOf(second)
        self.assertEqual(len(self.world.provider.specs), 1)
        self.assertEqual(self.record(id).state, SandboxState.READY)
        self.world.wait(1200)
        self.assertEqual(self.record(id).state, SandboxState.READY)

    def test_a_launch_that_became_ready_unwatched_is_given_to_who_asks_again(self) -> None:
        self.world.provider.booting = Deferred()
        first = self.start()
        first.cancel()
        self.failureResultOf(first)
        self.world.provider.booting.callback(None)
        (sandbox,) = self.world.node.inventory
        self.assertEqual(self.run_pod(), sandbox.id)
        self.failureResultOf(self.start(), AlreadyExists)

    def past(self) -> list[tuple[str, str]]:
        """Return the steps of the sandbox that is gone, and why they failed or what they say."""
        return [
            (step.what, step.error or step.detail)
            for step in self.world.node.inventory.past[-1].timeline.steps
        ]

    def test_why_it_is_gone_is_known_for_a_while(self) -> None:
        self.do(self.world.sandboxes.remove(self.run_pod()))
        self.assertEqual(self.past()[-1][0], "the pod is removed")
        self.world.provider.launch_error = ResourceExhausted("no address left")
        self.failureResultOf(self.start(), ResourceExhausted)
        self.assertIn(("the launch has failed", "no address left"), self.past())
        self.world.provider.launch_error = None
        self.world.provider.booting = Deferred()
        launch = self.start()
        (sandbox,) = self.world.node.inventory
        stop = start(self.world.sandboxes.stop(sandbox.id))
        self.world.wait(1)
        self.successResultOf(stop)
        self.failureResultOf(launch)
        self.assertIn("the launch is ended", [what for what, _ in self.past()])

    def test_a_launch_that_nobody_asks_for_again_is_ended(self) -> None:
        self.world.provider.booting = Deferred()
        first = self.start()
        first.cancel()
        self.failureResultOf(first)
        self.world.wait(self.world.times.desertion + 1)
        self.assertNothingLeft()
        self.assertIn(("the pod is ended", "nobody asked for it any more"), self.past())
        self.assertEqual(self.world.provider.calls[-1][0], "destroy")

    def test_a_ready_sandbox_that_nobody_was_told_of_is_ended(self) -> None:
        first = self.start()
        self.world.provider.booting = Deferred()
        second = self.start(pod("other"))
        second.cancel()
        self.failureResultOf(second)
        self.world.provider.booting.callback(None)
        self.assertEqual(len(self.world.provider.instances), 2)
        self.world.wait(self.world.times.desertion + 1)
        self.assertEqual(len(self.world.provider.instances), 1)
        self.assertEqual(self.record(self.successResultOf(first)).state, SandboxState.READY)

    def test_a_client_that_finds_it_by_listing_keeps_it(self) -> None:
        self.world.provider.booting = Deferred()
        first = self.start()
        first.cancel()
        self.failureResultOf(first)
        self.world.provider.booting.callback(None)
        (sandbox,) = self.world.node.inventory
        self.world.sandboxes.lookup(sandbox.id)
        self.world.wait(self.world.times.desertion + 1)
        self.assertEqual(self.record(sandbox.id).state, SandboxState.READY)
        self.assertTrue(self.record(sandbox.id).claimed)

    def test_a_name_is_one_sandboxes(self) -> None:
        self.run_pod()
        error = self.failureResultOf(self.start(), AlreadyExists).value
        self.assertIn("attempt 0", str(error))
        self.run_pod(pod(attempt=1))
        self.run_pod(pod(uid="u2"))
        self.run_pod(pod("a_b"))

    def test_another_configuration_under_the_name_of_a_launch_does_not_join_it(self) -> None:
        self.world.provider.booting = Deferred()
        first = self.start()
        self.failureResultOf(self.start(pod(hostname="another")), AlreadyExists)
        self.failureResultOf(self.start(handler="another"), AlreadyExists)
        self.world.provider.booting.callback(None)
        self.successResultOf(first)

    def test_a_launch_is_not_shown(self) -> None:
        self.world.provider.booting = Deferred()
        launch = self.start()
        (sandbox,) = self.world.node.inventory
        self.assertRaises(NotFound, self.world.sandboxes.lookup, sandbox.id)
        self.world.provider.booting.callback(None)
        self.assertIs(self.world.sandboxes.lookup(self.successResultOf(launch)), sandbox)

    def test_before_the_provider_has_started_the_answer_is_what_it_waits_for(self) -> None:
        self.world.node_provider.trouble = "building the template"
        error = self.failureResultOf(self.start(), Unavailable).value
        self.assertIn("building the template", str(error))

    def test_the_vms_size_is_the_pods(self) -> None:
        resources = cri.LinuxContainerResources(
            cpu_quota=50_000, cpu_period=100_000, memory_limit_in_bytes=2**30
        )
        overhead = cri.LinuxContainerResources(cpu_shares=256, memory_limit_in_bytes=2**20)
        linux = cri.LinuxPodSandboxConfig(resources=resources, overhead=overhead)
        self.assertEqual(size_of(pod(linux=linux)), Size(500, 2**30, 2**20))
        self.assertEqual(size_of(pod()), Size(0, 0))
        shares = cri.LinuxContainerResources(cpu_shares=2, cpu_quota=-1)
        self.assertEqual(size_of(pod(linux=cri.LinuxPodSandboxConfig(resources=shares))), Size(0, 0))


class FailureTests(PodsTestCase):
    """A launch leaves nothing behind, whichever step fails."""

    def test_the_provider_refuses(self) -> None:
        self.world.provider.launch_error = ResourceExhausted("no address left")
        self.failureResultOf(self.start(), ResourceExhausted)
        self.assertNothingLeft()
        self.world.provider.launch_error = None
        self.run_pod()

    def test_the_vm_does_not_come_up(self) -> None:
        self.world.provider.booting = Deferred()
        launch = self.start()
        self.world.wait(self.world.times.launch + 10)
        self.failureResultOf(launch, DeadlineExceeded)
        self.assertNothingLeft()

    def test_the_vm_ends_while_it_boots(self) -> None:
        self.world.provider.booting = Deferred()
        launch = self.start()
        (instance,) = self.world.provider.instances
        self.world.provider.end(instance, "kernel panic")
        error = self.failureResultOf(launch, Unavailable).value
        self.assertIn("kernel panic", str(error))
        self.assertNothingLeft()

    def start_with(self, **agent: object) -> Deferred[str]:
        """Begin a launch whose VM has come up. :param agent: attributes of its agent, from the first."""
        self.world.provider.booting = Deferred()
        launch = self.start()
        (made,) = self.world.agents.values()
        for name, value in agent.items():
            setattr(made, name, value)
        self.world.provider.booting.callback(None)
        return launch

    def test_the_agent_never_answers(self) -> None:
        launch = self.start_with(away=True)
        self.world.wait(self.world.times.launch + 10)
        self.failureResultOf(launch, DeadlineExceeded)
        self.assertNothingLeft()

    def test_the_agent_is_a_little_late(self) -> None:
        launch = self.start_with(away=True)
        self.world.wait(3)
        self.assertNoResult(launch)
        (agent,) = self.world.agents.values()
        agent.away = False
        self.world.wait(3)
        self.successResultOf(launch)

    def test_the_agent_is_another_sandboxes(self) -> None:
        self.failureResultOf(self.start_with(sandbox_id="another"), FailedPrecondition)
        self.assertNothingLeft()

    def test_the_agents_stream_never_says_what_there_is(self) -> None:
        launch = self.start_with(silent=True)
        self.world.wait(self.world.times.launch + 10)
        self.failureResultOf(launch, DeadlineExceeded)
        self.assertNothingLeft()

    def test_the_disk_is_full_after_the_vm_was_asked_for(self) -> None:
        self.world.provider.booting = Deferred()
        launch = self.start()
        self.world.store.failing = ResourceExhausted("full")
        self.world.provider.booting.callback(None)
        self.failureResultOf(launch, ResourceExhausted)
        self.assertEqual(self.world.provider.instances, {})
        self.world.store.failing = None
        self.world.wait(self.world.times.sweep + 1)
        self.assertNothingLeft()

    def test_a_vm_that_can_not_be_destroyed_keeps_its_record_until_it_is(self) -> None:
        self.world.provider.destroy_error = Unavailable("the IaaS is down")
        self.world.provider.booting = Deferred()
        launch = self.start()
        (instance,) = self.world.provider.instances
        self.world.provider.end(instance, "power")
        self.failureResultOf(launch, Unavailable)
        (record,) = self.world.store.contents().sandboxes
        self.assertEqual(record.state, SandboxState.ABANDONED)
        self.world.provider.booting = None
        self.world.provider.destroy_error = None
        self.run_pod()  # the name is free
        self.world.wait(self.world.times.sweep * 2)
        self.assertEqual(len(self.world.provider.instances), 1)
        self.assertEqual(len(self.world.store.contents().sandboxes), 1)

    def test_a_launch_is_stopped_while_the_provider_is_still_at_it(self) -> None:
        """The provider's answer is waited for, since it has the id of the VM to destroy."""
        self.world.provider.launching = Deferred()
        launch = self.start()
        (sandbox,) = self.world.node.inventory
        stop = start(self.world.sandboxes.stop(sandbox.id))
        self.assertNoResult(stop)
        self.world.provider.launching.callback(None)
        self.successResultOf(stop)
        self.failureResultOf(launch, Unavailable)
        self.assertNothingLeft()


class StopTests(PodsTestCase):
    """StopPodSandbox and RemovePodSandbox."""

    def setUp(self) -> None:
        super().setUp()
        self.sandbox = self.run_pod()
        self.agent = self.world.agents[self.sandbox]
        self.container = self.do(self.world.containers.create(self.sandbox, box()))
        self.do(self.world.containers.start(self.container))

    def test_what_nfs_servers_export_is_let_go_of_while_its_vm_is_there(self) -> None:
        seen: list[int] = []

        class Exports(PodFeature):
            name = "exports"

            async def stopping(self, sandbox: Sandbox) -> None:
                seen.append(len(world.provider.instances))

        world = self.world
        world.join(Exports())
        self.do(world.sandboxes.stop(self.sandbox))
        self.assertEqual((seen, len(world.provider.instances)), ([1], 0))

    def test_its_features_let_go_between_the_containers_ends_and_the_vms_and_free_what_it_had_after_it(
        self,
    ) -> None:
        seen: list[tuple[str, bool, bool, bool]] = []
        late: list[Deferred[str]] = []
        world, container = self.world, self.container

        class Feature(PodFeature):
            name = "one that looks"

            def note(self, what: str) -> None:
                ended = world.node.inventory.containers[container].state is ContainerState.EXITED
                seen.append((what, ended, late[0].called, bool(world.provider.instances)))

            async def before_create(self, container: Container) -> None:
                await Deferred()

            async def stopping(self, sandbox: Sandbox) -> None:
                self.note("stopping")

            async def vm_destroyed(self, sandbox: Sandbox) -> None:
                self.note("destroyed")

        world.join(Feature())
        late.append(start(world.containers.create(self.sandbox, box("late"))))
        late[0].addErrback(lambda _: None)
        self.do(world.sandboxes.stop(self.sandbox))
        self.assertEqual(seen, [("stopping", True, True, True), ("destroyed", True, True, False)])

    def test_one_whose_start_was_not_answered_is_ended_too(self) -> None:
        container = self.world.node.inventory.containers[self.container]
        container.record = attrs.evolve(container.record, state=ContainerState.STARTING)
        self.do(self.world.sandboxes.stop(self.sandbox))
        self.assertIn(("stop 0", self.container), self.agent.calls)

    def test_the_rest_of_the_log_of_one_that_has_ended_is_waited_for(self) -> None:
        self.agent.become(self.container, cri.CONTAINER_EXITED)
        self.world.logs.slow = Deferred()
        stop = start(self.world.sandboxes.stop(self.sandbox))
        self.assertNoResult(stop)
        self.assertEqual(len(self.world.provider.instances), 1)
        self.world.logs.slow.callback(None)
        self.successResultOf(stop)

    def test_one_that_was_deserted_and_is_stopped_stays_until_it_is_removed(self) -> None:
        deserted = self.start(pod("deserted"))
        (sandbox,) = (one for one in self.world.node.inventory if one.id != self.sandbox)
        self.successResultOf(deserted)
        self.world.sandboxes._begin_desertion(sandbox)
        self.do(self.world.sandboxes.stop(sandbox.id))
        self.world.wait(self.world.times.desertion + 1)
        self.assertEqual(self.record(sandbox.id).state, SandboxState.STOPPED)

    def test_two_who_remove_it_at_once_remove_it_once(self) -> None:
        removed: list[str] = []
        written: Deferred[None] = Deferred()
        delete = self.world.store.delete_sandbox

        def slow(id: str) -> Deferred[None]:
            removed.append(id)
            return written.addCallback(lambda _: delete(id))

        self.patch(self.world.store, "delete_sandbox", slow)
        both = [start(self.world.sandboxes.remove(self.sandbox)) for _ in range(2)]
        written.callback(None)
        for each in both:
            self.successResultOf(each)
        self.assertEqual(removed, [self.sandbox])
        self.assertNothingLeft()

    def test_containers_end_then_the_vm(self) -> None:
        self.do(self.world.sandboxes.stop(self.sandbox))
        self.assertEqual(self.world.provider.instances, {})
        self.assertEqual(self.record(self.sandbox).state, SandboxState.STOPPED)
        self.assertIn(("stop 0", self.container), self.agent.calls)
        (record,) = self.world.store.contents().containers
        self.assertEqual(record.state, ContainerState.EXITED)
        self.assertEqual((record.exit_code, record.finished_at), (143, 7))

    def test_twice_is_once(self) -> None:
        first = start(self.world.sandboxes.stop(self.sandbox))
        second = start(self.world.sandboxes.stop(self.sandbox))
        self.successResultOf(first)
        self.successResultOf(second)
        self.do(self.world.sandboxes.stop(self.sandbox))
        self.assertEqual([call for call, _ in self.world.provider.calls].count("destroy"), 1)

    def test_unknown_is_nothing_to_do(self) -> None:
        self.do(self.world.sandboxes.stop("f" * 32))
        self.do(self.world.sandboxes.remove("f" * 32))

    def test_the_beginning_of_an_id_is_enough(self) -> None:
        self.do(self.world.sandboxes.stop(self.sandbox[:12]))
        self.assertEqual(self.record(self.sandbox).state, SandboxState.STOPPED)

    def test_an_agent_that_does_not_answer_delays_it_no_longer_than_a_moment(self) -> None:
        self.agent.go_away()
        stop = start(self.world.sandboxes.stop(self.sandbox))
        self.world.wait(6)
        self.successResultOf(stop)
        (record,) = self.world.store.contents().containers
        self.assertEqual((record.state, record.exit_code), (ContainerState.EXITED, 137))
        self.assertEqual(self.world.provider.instances, {})

    def test_a_log_that_does_not_end_does_not_keep_the_vm(self) -> None:
        self.world.logs.slow = Deferred()
        stop = start(self.world.sandboxes.stop(self.sandbox))
        self.assertNoResult(stop)
        self.assertEqual(len(self.world.provider.instances), 1)
        self.world.wait(self.world.times.drain + 1)
        self.successResultOf(stop)

    def test_logs_that_advance_keep_the_vm_as_long_as_a_call_waits(self) -> None:
        """That of a container that runs, and that of one that has ended a moment ago."""
        ended = self.do(self.world.containers.create(self.sandbox, box("ended")))
        self.do(self.world.containers.start(ended))
        self.agent.become(ended, cri.CONTAINER_EXITED)
        self.world.logs.slow, self.world.logs.lacking = Deferred(), True
        log = SimpleNamespace(progress=0, lacking=False)
        for container in self.world.node.inventory.containers.values():
            container.pump = cast(Any, SimpleNamespace(log=log, say=lambda text: None))
        first = start(self.world.sandboxes.stop(self.sandbox, 60.0))
        second = start(self.world.sandboxes.stop(self.sandbox, 120.0))
        for _ in range(20):
            log.progress += 1
            self.world.clock.advance(5)
            self.assertEqual(len(self.world.provider.instances), 1)
        self.assertNoResult(second)
        self.world.clock.advance(10)
        self.successResultOf(first)
        self.successResultOf(second)
        self.assertEqual(self.world.provider.instances, {})
        for record in self.world.store.contents().containers:
            self.assertIn("its log is not complete", record.message)

    def test_a_vm_that_can_not_be_destroyed_is_said_and_tried_again_when_asked(self) -> None:
        self.world.provider.destroy_error = Unavailable("the IaaS is down")
        self.failureResultOf(start(self.world.sandboxes.stop(self.sandbox)), Unavailable)
        self.assertEqual(self.record(self.sandbox).state, SandboxState.STOPPING)
        sandbox = self.world.node.inventory.sandboxes[self.sandbox]
        self.assertIn("the IaaS is down", sandbox.failure)
        self.world.provider.destroy_error = None
        self.do(self.world.sandboxes.stop(self.sandbox))
        self.assertEqual((self.world.provider.instances, sandbox.failure), ({}, ""))

    def test_no_vm_is_destroyed_before_the_stop_is_on_the_disk(self) -> None:
        """Also by a second stop, if the first one could not be recorded."""
        self.world.store.failing = ResourceExhausted("full")
        for _ in range(2):
            self.failureResultOf(start(self.world.sandboxes.stop(self.sandbox)), ResourceExhausted)
            self.assertEqual(len(self.world.provider.instances), 1)
        self.world.store.failing = None
        self.do(self.world.sandboxes.stop(self.sandbox))
        self.assertEqual(self.world.provider.instances, {})

    def test_a_second_stop_while_a_pod_is_being_recorded_ends_it(self) -> None:
        """The first one has cancelled the launch, which waits for the record to undo it."""
        held: list[Deferred[None]] = []
        real = self.world.store.put_sandbox

        def put(record: Any) -> Deferred[None]:
            written = real(record)
            held.append(Deferred())
            return held[-1].addCallback(lambda _: written)

        patch = self.patch(self.world.store, "put_sandbox", put)
        launching = self.start(pod("second"))
        (sandbox,) = (one for one in self.world.node.inventory if one.id != self.sandbox)
        stops = [start(self.world.sandboxes.stop(sandbox.id)) for _ in range(2)]
        patch.restore()
        held[0].callback(None)
        for one in stops:
            self.successResultOf(one)
        self.failureResultOf(launching, Unavailable)
        self.assertEqual([one.id for one in self.world.store.contents().sandboxes], [self.sandbox])
        self.run_pod(pod("second"))

    def test_removing_leaves_nothing(self) -> None:
        self.do(self.world.sandboxes.stop(self.sandbox))
        self.do(self.world.sandboxes.remove(self.sandbox))
        self.assertNothingLeft()
        self.do(self.world.sandboxes.remove(self.sandbox))

    def test_removing_a_running_one_stops_it_first(self) -> None:
        self.do(self.world.sandboxes.remove(self.sandbox))
        self.assertNothingLeft()

    def test_the_name_is_free_after_removal_alone(self) -> None:
        self.do(self.world.sandboxes.stop(self.sandbox))
        self.failureResultOf(self.start(), AlreadyExists)
        self.do(self.world.sandboxes.remove(self.sandbox))
        self.run_pod()

    def test_a_container_being_created_does_not_outlive_the_sandbox(self) -> None:
        self.agent.holding = Deferred()
        self.agent.loaded.clear()
        create = start(self.world.containers.create(self.sandbox, box("late")))
        self.do(self.world.sandboxes.stop(self.sandbox))
        self.failureResultOf(create, Unavailable)
        self.assertEqual(len(self.world.store.contents().containers), 1)


class LossTests(PodsTestCase):
    """A VM that ends by itself."""

    def setUp(self) -> None:
        super().setUp()
        self.sandbox = self.run_pod()
        self.container = self.do(self.world.containers.create(self.sandbox, box()))
        self.do(self.world.containers.start(self.container))
        (self.instance,) = self.world.provider.instances

    def test_the_sandbox_is_not_ready_and_its_containers_have_ended(self) -> None:
        self.world.provider.end(self.instance, "out of memory")
        self.assertEqual(self.record(self.sandbox).state, SandboxState.LOST)
        (record,) = self.world.store.contents().containers
        self.assertEqual((record.state, record.exit_code), (ContainerState.EXITED, 137))
        self.assertIn("out of memory", record.message)
        self.do(self.world.sandboxes.stop(self.sandbox))
        self.do(self.world.sandboxes.remove(self.sandbox))
        self.assertNothingLeft()

    def test_it_is_told_once_and_changes_nothing_later(self) -> None:
        self.world.provider.end(self.instance, "first")
        self.world.provider.end(self.instance, "second")
        self.assertIn("first", self.record(self.sandbox).message)
        self.do(self.world.sandboxes.stop(self.sandbox))
        self.world.sandboxes.ended(
            self.world.node_provider,
            Instance(self.instance, self.record(self.sandbox).token, self.sandbox, InstanceState.ENDED),
        )
        self.assertEqual(self.record(self.sandbox).state, SandboxState.STOPPED)

    def test_another_providers_vm_of_its_token_is_not_its_own(self) -> None:
        token = self.record(self.sandbox).token
        other = Instance("other", token, self.sandbox, InstanceState.ENDED)
        self.world.sandboxes.ended(cast(NodeProvider, object()), other)
        self.assertEqual(self.record(self.sandbox).state, SandboxState.READY)

    def test_each_feature_is_told(self) -> None:
        told: list[str] = []

        class Feature(PodFeature):
            name = "one that is told"

            def lost(self, sandbox: Sandbox) -> None:
                told.append(sandbox.id)

        self.world.join(Feature())
        self.world.provider.end(self.instance, "out of memory")
        self.assertEqual(told, [self.sandbox])

    def test_one_that_was_stopped_is_not_lost_when_its_vm_is_looked_for(self) -> None:
        sandbox = self.world.node.inventory.sandboxes[self.sandbox]
        self.do(self.world.sandboxes.stop(self.sandbox))
        self.do(self.world.sandboxes.look(sandbox))
        self.assertEqual(self.record(self.sandbox).state, SandboxState.STOPPED)

    def test_nothing_can_be_made_in_it(self) -> None:
        self.world.provider.end(self.instance, "gone")
        create = start(self.world.containers.create(self.sandbox, box("more")))
        self.failureResultOf(create, FailedPrecondition)

    def test_an_unknown_vm_ends(self) -> None:
        self.world.sandboxes.ended(self.world.node_provider, Instance("x", "t", "s", InstanceState.ENDED))
