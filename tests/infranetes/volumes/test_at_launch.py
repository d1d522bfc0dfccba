# SPDX-License-Identifier: Apache-2.0
"""A pod's volumes before it has a container: which of them its VM has been given by then."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from twisted.internet.defer import Deferred
from twisted.logger import capturedLogs
from twisted.python.monkey import MonkeyPatcher

from infranetes.pods.store.states import SandboxState
from infranetes.volumes.published import PublishedVolume
from infranetes_common.concurrency import start
from infranetes_common.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable
from infranetes_common.volume_disks import serial_of
from tests.infranetes.pods.case import PodsTestCase
from tests.infranetes.pods.fake_agent import FakeAgent
from tests.infranetes.pods.fakes import FakeNode, pod
from tests.infranetes.volumes.mounting_case import mounting
from tests.infranetes.volumes.pod_volumes_case import (
    DATA,
    DISK,
    PUBLISHED,
    VOLUMES,
    AtLaunchCase,
    KilledCase,
    NodeWithoutVolumes,
    VolumesNode,
)
from tests.support.user_namespaces import namespaces, of_pod


class AttachTests(AtLaunchCase):
    def test_volumes_are_recorded_and_attached_without_a_container(self) -> None:
        sandbox = self.run_pod(self.new)
        instance = self.instance(sandbox)
        self.assertEqual(self.volumes.at, {"vol-data": instance, "vol-logs": instance})
        self.assertEqual(self.kept(), [("vol-data", instance), ("vol-logs", instance)])
        self.stop(sandbox)
        self.assert_nobody_has_them()

    def test_a_pod_with_user_namespaces_is_given_none_since_its_containers_are_refused(self) -> None:
        self.new.annotations["infranetes.io/containers"] = "oci"
        self.new.linux.CopyFrom(of_pod(namespaces()))
        self.run_pod(self.new)
        self.assert_nobody_has_them()
        self.assertEqual(self.volumes.calls, [])

    def test_the_record_is_there_first_and_the_vm_runs_by_then(self) -> None:
        seen = []
        attach = self.volumes.attach

        def looking(instance: str, volume: str, read_only: bool) -> Deferred[str]:
            seen.append((instance in self.world.provider.instances, len(self.kept()) > 0))
            return attach(instance, volume, read_only)

        self.patch(self.volumes, "attach", looking)
        self.run_pod(self.new)
        self.assertEqual(seen, [(True, True)] * 2)

    def test_the_agent_starts_meanwhile_and_the_pod_is_ready_before(self) -> None:
        self.volumes.attaching = Deferred()
        sandbox = self.run_pod(self.new)
        creating = start(self.world.containers.create(sandbox, mounting(DATA)))
        self.assertNoResult(creating)
        self.volumes.attaching.callback(None)
        self.successResultOf(creating)

    def test_the_next_daemon_does_not_ask_again_for_what_a_ready_pod_has(self) -> None:
        self.run_pod(self.new)
        self.volumes.calls.clear()
        self.world.restart()
        self.assertEqual(self.volumes.calls, [])

    def test_what_a_daemon_that_stops_leaves_undone_is_no_news(self) -> None:
        self.volumes.attaching = Deferred()
        self.run_pod(self.new)
        self.world.stop()
        with capturedLogs() as logged:
            self.volumes.attaching.errback(Unavailable("the provider stops, too"))
        self.assertEqual([one for one in logged if "what" in one], [])

    def test_a_pod_without_volumes_asks_for_nothing(self) -> None:
        self.run_pod(pod("plain", uid="n2"))
        self.assertEqual(self.volumes.calls, [])

    def test_what_fails_does_not_fail_the_pod_and_the_container_says_it(self) -> None:
        for number, error in enumerate((NotFound("no such volume"), Unavailable("no answer"))):
            self.volumes.attach_error = error
            self.world.of_pods[f"u{number}"] = VOLUMES[:1]
            with capturedLogs() as logged:
                sandbox = self.run_pod(pod(f"pod{number}", uid=f"u{number}"))
            self.assertEqual([one["what"] for one in logged if "what" in one], ["attached"])
            self.assertIn(str(error), self.refused(type(error), mounting(DATA), sandbox))
            self.volumes.attach_error = None
            self.create(mounting(DATA), sandbox)
            self.assertEqual(self.volumes.at, {"vol-data": self.instance(sandbox)})
            self.stop(sandbox)
            self.assert_nobody_has_them()

    def test_one_that_fails_does_not_keep_the_others(self) -> None:
        self.create(mounting(DATA))
        sandbox = self.run_pod(self.new)
        self.assertEqual(
            self.volumes.at, {"vol-data": self.instance(self.sandbox), "vol-logs": self.instance(sandbox)}
        )
        self.assertIn("one pod's at a time", self.refused(FailedPrecondition, mounting(DATA), sandbox))

    def test_one_that_is_asked_for_with_options_that_nobody_has_is_not_attached(self) -> None:
        self.world.of_pods["n1"] = [PUBLISHED["/odd"]]
        sandbox = self.run_pod(self.new)
        self.assertEqual(self.volumes.calls, [])
        self.assertIn("dax", self.refused(InvalidArgument, mounting("/odd"), sandbox))

    def test_which_are_published_may_be_unknown(self) -> None:
        async def failing(uid: str) -> list[PublishedVolume]:
            raise Unavailable("the node's mounts can't be read")

        self.patch(self.world, "find_for_pod", failing)
        self.world.restart()
        self.create(mounting(DATA), self.run_pod(self.new))

    def test_a_pod_that_is_stopped_meanwhile_leaves_nothing(self) -> None:
        self.volumes.attaching = Deferred()
        sandbox = self.run_pod(self.new)
        self.assertEqual(len(self.kept()), 2)
        self.stop(sandbox)
        self.assert_nobody_has_them()
        self.volumes.attaching.callback(None)
        self.assert_nobody_has_them()

    def test_it_is_begun_once_and_ends_by_itself(self) -> None:
        self.volumes.attaching = Deferred()
        sandbox = self.run_pod(self.new)
        at_launch = self.pod_volumes._at_launch
        at_launch.begin(self.world.node.inventory.sandboxes[sandbox])
        self.volumes.attaching.callback(None)
        self.assertEqual([call[0] for call in self.volumes.calls], ["attach"] * 2)
        self.assertEqual(at_launch._launches, {})

    def test_a_bug_is_logged_and_the_pod_is_ready_all_the_same(self) -> None:
        self.volumes.attach_error = ZeroDivisionError()
        self.run_pod(self.new)
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)
        self.assertEqual(self.pod_volumes._at_launch._launches, {})

    def test_a_launch_that_fails_then_leaves_nothing(self) -> None:
        for error in (None, FailedPrecondition("no")):
            self.volumes.detach_error = error
            self.world.provider.booting = Deferred()
            launching = self.start(self.new)
            self.world.provider.booting = None
            [instance] = set(self.world.provider.instances) - {self.instance(self.sandbox)}
            self.world.provider.end(instance, "killed")
            self.failureResultOf(launching, Unavailable)
            self.assert_nobody_has_them()

    def test_an_agent_that_never_answers_costs_the_pod_but_no_volume(self) -> None:
        self.silence_agents()
        launching = self.start(self.new)
        self.assertEqual(len(self.volumes.at), 2)
        self.world.wait(self.world.times.launch + 10.0)
        self.failureResultOf(launching)
        self.assert_nobody_has_them()


class MountTests(AtLaunchCase):
    def serials(self, sandbox: str) -> set[str]:
        return self.world.agents[sandbox].disks

    def test_volumes_are_mounted_without_a_container(self) -> None:
        self.world.of_pods["n1"] = [*VOLUMES, PUBLISHED[DISK]]
        sandbox = self.run_pod(self.new)
        wanted = {serial_of(one) for one in ("vol-data", "vol-logs", "vol-disk")}
        self.assertEqual(self.serials(sandbox), wanted)
        self.stop(sandbox)
        self.assertEqual(self.serials(sandbox), set())
        self.assert_nobody_has_them()

    def test_nothing_is_mounted_before_the_agent_answers(self) -> None:
        self.silence_agents()
        self.start(self.new).addErrback(lambda _: None)
        [agent] = [one for one in self.world.agents.values() if one.away]
        self.assertEqual(len(self.volumes.at), 2)
        self.assertEqual([call for call in agent.calls if "mount" in call[0]], [])

    def test_the_pod_is_ready_meanwhile_and_its_container_waits(self) -> None:
        mounting_: Deferred[None] = Deferred()
        hung = self.hold(mounting_)
        sandbox = self.run_pod(self.new)
        creating = start(self.world.containers.create(sandbox, mounting(DATA)))
        self.assertNoResult(creating)
        hung.restore()
        mounting_.callback(None)
        self.successResultOf(creating)

    def test_a_pod_that_is_stopped_meanwhile_leaves_nothing(self) -> None:
        hung = self.hold(Deferred())
        sandbox = self.run_pod(self.new)
        hung.restore()
        self.stop(sandbox)
        self.assertEqual(self.serials(sandbox), set())
        self.assert_nobody_has_them()

    def test_what_fails_does_not_fail_the_pod_and_the_container_says_it(self) -> None:
        async def failing(agent: FakeAgent, *asked: object, **more: object) -> None:
            raise FailedPrecondition("the volume holds vfat")

        failed = self.patch(FakeAgent, "mount_disk", failing)
        sandbox = self.run_pod(self.new)
        self.assertIn("holds vfat", self.refused(FailedPrecondition, mounting(DATA), sandbox))
        failed.restore()
        self.create(mounting(DATA), sandbox)
        self.assertEqual(self.serials(sandbox), {serial_of("vol-data")})

    def test_what_is_not_attached_is_not_mounted(self) -> None:
        self.volumes.attach_error = FailedPrecondition("no")
        sandbox = self.run_pod(self.new)
        self.assertEqual(self.serials(sandbox), set())
        self.assertEqual(len(self.volumes.calls), 2, "each is asked for once")

    def test_what_is_not_the_pods_any_more_is_not_mounted(self) -> None:
        sandbox = self.run_pod(pod("plain", uid="n2"))
        of_inventory = self.world.node.inventory.sandboxes[sandbox]
        self.create(mounting(DATA))
        for volume in (PublishedVolume("vol-none"), PUBLISHED[DATA]):  # nobody's, and another pod's
            self.successResultOf(start(self.pod_volumes._mount(of_inventory, volume)))
        self.assertEqual(self.serials(sandbox), set())

    def hold(self, until: Deferred[None]) -> MonkeyPatcher:
        """Hold up agents' mounting of volumes until this fires."""
        mount = FakeAgent.mount_disk

        async def holding(
            agent: FakeAgent,
            serial: str,
            filesystem: str,
            options: Sequence[str],
            *,
            read_only: bool,
            group: int | None,
        ) -> None:
            await until
            await mount(agent, serial, filesystem, options, read_only=read_only, group=group)

        held: MonkeyPatcher = self.patch(FakeAgent, "mount_disk", holding)
        return held


class KilledTests(KilledCase):
    """The daemon is killed at each step: no volume leaks, none is lost, none is attached twice."""

    def setUp(self) -> None:
        super().setUp()
        self.number = 0

    def new_pod(self) -> object:
        self.number += 1
        uid = f"n{self.number}"
        self.world.of_pods = {uid: VOLUMES[:1]}
        return pod(f"new{self.number}", uid=uid)

    def running(self) -> list[str]:
        kept = self.world.store.contents().sandboxes
        return [one.id for one in kept if one.state is not SandboxState.STOPPED]

    def launching(self) -> Iterator[tuple[object, str, bool]]:
        for name in ("put_attachment", "attach"):
            for after in (False, True):
                yield {"attach": self.volumes}.get(name, self.world.store), name, after

    def test_while_it_attaches_and_mounts_for_a_pod_that_is_ready(self) -> None:
        mounting_ = [(FakeAgent, "mount_disk", after) for after in (False, True)]
        for number, (holder, name, after) in enumerate([*self.launching(), *mounting_]):
            hung = self.hang(holder, name, after=after)
            sandbox = self.run_pod(self.new_pod())
            hung.restore()
            self.next_daemon()
            self.create(mounting(DATA, name=f"c{number}"), sandbox)
            self.assertEqual(self.volumes.at, {"vol-data": self.instance(sandbox)})
            self.assertEqual(self.kept(), [("vol-data", self.instance(sandbox))])
            self.stop(sandbox)
            self.assert_the_next_pod_has_it(number)

    def test_while_it_attaches_and_nobody_asks_for_the_pod_again(self) -> None:
        for number, (holder, name, after) in enumerate(self.launching()):
            hung = self.hang(holder, name, after=after)
            silenced = self.silence_agents()
            launching = self.start(self.new_pod())
            launching.addErrback(lambda _: None)
            self.assertFalse(launching.called, name)
            silenced.restore()
            hung.restore()
            self.next_daemon()
            self.world.wait(self.world.times.desertion + self.world.times.launch + 30.0)
            self.assertEqual(self.running(), [self.sandbox], name)
            self.assert_the_next_pod_has_it(number)

    def test_while_a_failed_launch_is_undone(self) -> None:
        holders = {
            "destroy": self.world.provider,
            "detach": self.volumes,
            "delete_attachment": self.world.store,
            "delete_sandbox": self.world.store,
        }
        for number, (name, after) in enumerate(
            [(name, after) for name in holders for after in (False, True)]
        ):
            silenced = self.silence_agents()
            launching = self.start(self.new_pod())
            launching.addErrback(lambda _: None)
            self.assertEqual(len(self.volumes.at), 1)
            silenced.restore()
            hung = self.hang(holders[name], name, after=after)
            [instance] = set(self.world.provider.instances) - {self.instance(self.sandbox)}
            self.world.provider.end(instance, "killed")
            self.assertFalse(launching.called, name)
            hung.restore()
            self.next_daemon()
            self.world.wait(61)
            self.assertEqual(self.running(), [self.sandbox], name)
            self.assert_the_next_pod_has_it(number)


class WithoutVolumesTests(PodsTestCase):
    def make_world(self) -> FakeNode:
        return NodeWithoutVolumes()

    def test_a_provider_that_has_none_is_asked_nothing(self) -> None:
        world = self.world
        assert isinstance(world, VolumesNode)
        asked = []

        async def find_for_pod(uid: str) -> list[PublishedVolume]:
            asked.append(uid)
            return VOLUMES

        self.patch(world, "find_for_pod", find_for_pod)
        world.restart()
        self.run_pod(pod("new", uid="n1"))
        self.assertEqual((world.store.contents().attachments, asked), ((), []))
