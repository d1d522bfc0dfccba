# SPDX-License-Identifier: Apache-2.0
"""Volumes are attached to their pod's VM, to one at a time, and free again once it is stopped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from twisted.internet.defer import Deferred, fail, succeed
from twisted.python.monkey import MonkeyPatcher
from zope.interface import implementer

from infranetes.providers.volumes import IHasVolumes
from infranetes.volumes.pod_volumes import PodVolumes
from infranetes.volumes.published import PublishedVolume
from infranetes_common.concurrency import start
from infranetes_common.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable, Unimplemented
from infranetes_common.filesync.wire import PREFIX
from infranetes_common.volume_disks import serial_of
from infranetes_common.wire import cri
from tests.infranetes.pods.case import PodsTestCase
from tests.infranetes.pods.fakes import FakeNode, FakeProvider, box, pod

DATA, LOGS = "/pods/u1/volumes/kubernetes.io~csi/data/mount", "/pods/u1/volumes/kubernetes.io~csi/logs/mount"
PUBLISHED: Mapping[str, PublishedVolume] = {
    DATA: PublishedVolume("vol-data", "ext4", ("noatime",), group=7),
    LOGS: PublishedVolume("vol-logs", "xfs", read_only=True),
    "/part": PublishedVolume("vol-data", "ext4", ("noatime",), group=7, below="a/b"),
    "/odd": PublishedVolume("vol-odd", "ext4", ("dax",)),
}


class FakeVolumes:
    """Volumes that one VM has at a time, as their provider knows it.

    :ivar at: the VM that has a volume. :ivar calls: in order.
    """

    def __init__(self, provider: FakeProvider) -> None:
        self._provider = provider
        self.at: dict[str, str] = {}
        self.calls: list[tuple[str, str, str]] = []
        self.attach_error: Exception | None = None
        self.detach_error: Exception | None = None
        self.attaching: Deferred[None] | None = None

    def attach(self, instance_id: str, volume_id: str, read_only: bool) -> Deferred[str]:
        return start(self._attach(instance_id, volume_id))

    async def _attach(self, instance_id: str, volume_id: str) -> str:
        self.calls.append(("attach", instance_id, volume_id))
        if self.attach_error is not None:
            raise self.attach_error
        holder = self.at.get(volume_id, instance_id)
        if holder != instance_id and holder in self._provider.instances:
            raise FailedPrecondition(f"{volume_id} is attached to {holder}")
        self.at[volume_id] = instance_id
        if self.attaching is not None:
            await self.attaching
        return serial_of(volume_id)

    def detach(self, instance_id: str, volume_id: str) -> Deferred[None]:
        self.calls.append(("detach", instance_id, volume_id))
        if self.detach_error is not None and instance_id in self._provider.instances:
            return fail(self.detach_error)
        if self.at.get(volume_id) == instance_id:
            del self.at[volume_id]
        return succeed(None)


@implementer(IHasVolumes)
class ProviderWithVolumes(FakeProvider):
    def __init__(self, world: FakeNode) -> None:
        super().__init__(world)
        self.volumes = FakeVolumes(self)


class VolumesNode(FakeNode):
    provider: FakeProvider

    def make_provider(self) -> FakeProvider:
        return ProviderWithVolumes(self)

    def made(self) -> None:
        self.node.pod_volumes = PodVolumes(self.node, self.find)
        self.node.pod_volumes.load(self.store.contents().attachments)

    async def find(self, paths: Sequence[str]) -> list[PublishedVolume | None]:
        return [PUBLISHED.get(path) for path in paths]


class NodeWithoutVolumes(VolumesNode):
    def make_provider(self) -> FakeProvider:
        return FakeProvider(self)


def mounting(*paths: str, name: str = "main", **fields: Any) -> Any:
    """A container with these paths of the node mounted."""
    mounts = [cri.Mount(container_path=f"/m{number}", host_path=path) for number, path in enumerate(paths)]
    return box(name, mounts=mounts, **fields)


class PodVolumesCase(PodsTestCase):
    """A sandbox that runs, on a node with volumes."""

    world: VolumesNode

    def make_world(self) -> FakeNode:
        return VolumesNode()

    def setUp(self) -> None:
        super().setUp()
        self.created: list[Any] = []
        self.sandbox = self.run_pod()
        self.watch_agent(self.sandbox)

    def watch_agent(self, sandbox: str) -> Any:
        """Keep what the sandbox's agent is asked to create."""
        agent = self.agent = self.world.agents[sandbox]
        create = agent.create

        async def keeping(id: str, image_id: str, config: Any, sandbox: Any) -> Any:
            self.created.append(config)
            return await create(id, image_id, config, sandbox)

        self.patch(agent, "create", keeping)
        return agent

    @property
    def volumes(self) -> FakeVolumes:
        assert isinstance(self.world.provider, ProviderWithVolumes)
        return self.world.provider.volumes

    @property
    def pod_volumes(self) -> PodVolumes:
        assert self.world.node.pod_volumes is not None
        return self.world.node.pod_volumes

    def instance(self, sandbox: str) -> str:
        return str(self.record(sandbox).instance_id)

    def create(self, config: Any, sandbox: str = "") -> str:
        return str(self.do(self.world.containers.create(sandbox or self.sandbox, config)))

    def refused(self, error: type[Exception], config: Any, sandbox: str = "") -> str:
        creating = start(self.world.containers.create(sandbox or self.sandbox, config))
        return str(self.failureResultOf(creating, error).value)

    def stop(self, sandbox: str) -> None:
        self.do(self.world.sandboxes.stop(sandbox))

    def kept(self) -> list[tuple[str, str]]:
        """The recorded volumes, with their VMs."""
        return [(one.id, one.instance_id) for one in self.world.store.contents().attachments]

    def second_pod(self) -> str:
        return self.run_pod(pod("db", uid="u2"))


class PodVolumesTests(PodVolumesCase):
    def test_a_volume_is_recorded_attached_mounted_and_named_to_the_container(self) -> None:
        self.create(mounting(DATA, "/etc/hosts", LOGS))
        data, logs = serial_of("vol-data"), serial_of("vol-logs")
        self.assertEqual(
            [call for call in self.agent.calls if call[0].startswith("mount")],
            [("mount ext4 noatime False 7", data), ("mount xfs  True None", logs)],
        )
        [config] = self.created
        self.assertEqual(
            [(one.host_path, one.readonly) for one in config.mounts],
            [
                (PREFIX + data, False),
                ("/etc/hosts", False),
                (PREFIX + logs, True),
            ],
        )
        instance = self.instance(self.sandbox)
        self.assertEqual(self.kept(), [("vol-data", instance), ("vol-logs", instance)])
        self.assertEqual(self.volumes.at, {"vol-data": instance, "vol-logs": instance})

    def test_all_containers_of_a_pod_share_it_and_a_part_of_it(self) -> None:
        self.create(mounting(DATA))
        self.create(mounting("/part", name="other"))
        self.assertEqual(self.created[1].mounts[0].host_path, f"{PREFIX}{serial_of('vol-data')}/a/b")
        self.assertEqual(len(self.kept()), 1)

    def test_the_record_is_there_before_the_provider_is_asked(self) -> None:
        seen = []
        attach = self.volumes.attach

        def looking(*asked: Any) -> Any:
            seen.append(self.kept())
            return attach(*asked)

        self.patch(self.volumes, "attach", looking)
        self.create(mounting(DATA))
        self.assertEqual(seen, [[("vol-data", self.instance(self.sandbox))]])

    def test_a_stopped_sandbox_has_none_any_more(self) -> None:
        self.create(mounting(DATA))
        instance = self.instance(self.sandbox)
        for _ in range(2):
            self.stop(self.sandbox)
        self.assertIn(("unmount", serial_of("vol-data")), self.agent.calls)
        self.assertEqual(self.volumes.calls[-1], ("detach", instance, "vol-data"))
        self.assertEqual((self.kept(), self.volumes.at), ([], {}))
        second = self.second_pod()
        self.create(mounting(DATA), second)
        self.assertEqual(self.volumes.at, {"vol-data": self.instance(second)})

    def test_another_pod_is_refused_and_told_who_has_it(self) -> None:
        self.create(mounting(DATA))
        second = self.second_pod()
        for _ in range(2):
            words = self.refused(FailedPrecondition, mounting(DATA), second)
            self.assertIn("default/web", words)
            self.assertIn("one pod's at a time", words)
            self.assertIn(DATA, words)
        self.assertEqual(self.kept(), [("vol-data", self.instance(self.sandbox))])
        self.stop(second)
        self.assertEqual(self.volumes.at, {"vol-data": self.instance(self.sandbox)})

    def test_the_disk_of_a_vm_that_has_ended_by_itself_goes_to_the_next_pod(self) -> None:
        self.create(mounting(DATA))
        self.world.provider.end(self.instance(self.sandbox), "killed")
        second = self.second_pod()
        self.create(mounting(DATA), second)
        self.assertEqual(self.kept(), [("vol-data", self.instance(second))])
        self.stop(self.sandbox)
        self.assertEqual(self.volumes.at, {"vol-data": self.instance(second)}, "it is not the first pod's")

    def test_a_detach_that_fails_leaves_the_record_until_the_vm_is_gone(self) -> None:
        self.create(mounting(DATA))
        self.volumes.detach_error = Unavailable("QEMU does not let go")
        self.world.provider.destroy_error = Unavailable("not now")
        self.failureResultOf(start(self.world.sandboxes.stop(self.sandbox)), Unavailable)
        self.assertEqual(self.kept(), [("vol-data", self.instance(self.sandbox))])
        self.assertIn("one pod's", self.refused(FailedPrecondition, mounting(DATA), self.second_pod()))
        self.world.provider.destroy_error = None
        self.stop(self.sandbox)
        self.assertEqual(self.kept(), [])

    def test_a_detach_that_hangs_holds_the_stop_for_a_while_only(self) -> None:
        self.create(mounting(DATA))
        self.patch(self.volumes, "detach", lambda *asked: Deferred())
        stopping = start(self.world.sandboxes.stop(self.sandbox))
        self.world.wait(31)
        self.world.wait(31)
        self.successResultOf(stopping)
        self.assertEqual(self.world.provider.instances, {})
        self.assertEqual(len(self.kept()), 1, "nobody has said that it is detached")

    def test_an_agent_that_is_away_is_not_waited_for(self) -> None:
        self.create(mounting(DATA))
        self.agent.go_away()
        stopping = start(self.world.sandboxes.stop(self.sandbox))
        self.world.wait(10)
        self.successResultOf(stopping)
        self.assertNotIn(("unmount", serial_of("vol-data")), self.agent.calls)
        self.assertEqual(self.kept(), [])

    def test_what_is_still_used_in_the_vm_is_detached_all_the_same(self) -> None:
        self.create(mounting(DATA))
        self.agent.unmount_error = FailedPrecondition("still used")
        self.stop(self.sandbox)
        self.assertEqual((self.kept(), self.volumes.at), ([], {}))

    def test_one_that_certainly_is_not_attached_leaves_no_record(self) -> None:
        for error in (NotFound("no such volume"), FailedPrecondition("elsewhere")):
            self.volumes.attach_error = error
            self.refused(type(error), mounting(DATA))
            self.assertEqual(self.kept(), [])
        self.volumes.attach_error = Unavailable("no answer")
        self.refused(Unavailable, mounting(DATA))
        self.assertEqual(len(self.kept()), 1, "it may be attached")
        self.volumes.attach_error = None
        self.create(mounting(DATA))
        self.assertEqual(len(self.kept()), 1)

    def test_what_the_vm_can_not_mount_is_told_and_stays_the_pods(self) -> None:
        self.agent.mount_error = FailedPrecondition("the volume holds xfs")
        words = self.refused(FailedPrecondition, mounting(DATA))
        self.assertIn("config.mounts[0]", words)
        self.assertEqual(len(self.kept()), 1)
        self.agent.mount_error = Unimplemented("unknown call")
        self.assertIn("guest image", self.refused(FailedPrecondition, mounting(DATA)))
        self.stop(self.sandbox)
        self.assertEqual((self.kept(), self.volumes.at), ([], {}))

    def test_what_can_not_be_had_is_refused_before_anything_is_attached(self) -> None:
        self.assertIn("dax", self.refused(InvalidArgument, mounting("/odd")))
        mapped = mounting(DATA)
        for mappings in (mapped.mounts[0].uidMappings, mapped.mounts[0].gidMappings):
            mappings.add(container_id=0, host_id=65536, length=65536)
        userns = pod("mapped", uid="u3", annotations={"infranetes.io/containers": "oci"})
        options = userns.linux.security_context.namespace_options.userns_options
        options.mode = cri.POD
        for mappings in (options.uids, options.gids):
            mappings.add(container_id=0, host_id=65536, length=65536)
        mapped.linux.security_context.namespace_options.userns_options.CopyFrom(options)
        self.assertIn("mapped", self.refused(FailedPrecondition, mapped, self.run_pod(userns)))
        self.assertEqual((self.kept(), self.volumes.calls), ([], []))

    def test_a_killed_daemon_s_volumes_are_known_to_the_next(self) -> None:
        self.create(mounting(DATA))
        self.world.restart()
        self.assertEqual(self.pod_volumes.user_of("vol-data"), f"pod default/web (sandbox {self.sandbox})")
        self.assertIn("one pod's", self.refused(FailedPrecondition, mounting(DATA), self.second_pod()))
        self.stop(self.sandbox)
        self.assertEqual((self.kept(), self.volumes.at), ([], {}))

    def test_a_daemon_that_is_killed_while_it_attaches_leaves_no_volume_behind(self) -> None:
        self.volumes.attaching = Deferred()
        creating = start(self.world.containers.create(self.sandbox, mounting(DATA)))
        self.assertNoResult(creating)
        creating.addErrback(lambda _: None)
        self.world.kill()
        self.volumes.attaching = None
        self.world.begin()
        self.world.provider_ready()
        self.assertEqual(len(self.kept()), 1)
        self.stop(self.sandbox)
        self.assertEqual((self.kept(), self.volumes.at), ([], {}))

    def test_what_was_left_by_sandboxes_that_are_no_more_is_swept(self) -> None:
        self.create(mounting(DATA, LOGS))
        self.patch(self.volumes, "detach", lambda *asked: fail(Unavailable("no answer")))
        self.stop(self.sandbox)
        self.do(self.world.sandboxes.remove(self.sandbox))
        self.assertEqual(len(self.kept()), 2)
        self.volumes.__dict__.pop("detach")
        self.world.restart()
        self.assertEqual((self.kept(), self.volumes.at), ([], {}))

    def test_volumes_in_use_are_measured_and_grown(self) -> None:
        self.assertIsNone(self.do(self.pod_volumes.usage("vol-data")))
        self.create(mounting(DATA))
        self.assertEqual(self.do(self.pod_volumes.usage("vol-data")).total_bytes, 1000)
        self.assertEqual(self.do(self.pod_volumes.usage("vol-data", grow=True)).total_bytes, 1001)
        self.agent.disks.clear()
        self.assertIsNone(self.do(self.pod_volumes.usage("vol-data")))
        self.stop(self.sandbox)
        self.assertIsNone(self.do(self.pod_volumes.usage("vol-data")))
        self.assertEqual(self.pod_volumes.user_of("vol-data"), "")


class KilledAnywhereTests(PodVolumesCase):
    """The daemon is killed before or after each step: no volume leaks, none is lost, none attached twice."""

    def hang(self, holder: object, name: str, *, after: bool) -> MonkeyPatcher:
        """Have a step begin and never be told to have ended, with its effect or without."""
        step = getattr(holder, name)

        async def hanging(*asked: Any, **more: Any) -> Any:
            if after:
                await step(*asked, **more)
            await Deferred()

        hung: MonkeyPatcher = self.patch(holder, name, lambda *asked, **more: start(hanging(*asked, **more)))
        return hung

    def steps(self, *names: str) -> Iterator[tuple[object, str, bool]]:
        holders = {
            "put_attachment": self.world.store,
            "delete_attachment": self.world.store,
            "attach": self.volumes,
            "detach": self.volumes,
            "destroy": self.world.provider,
        }
        for name in names:
            for after in (False, True):
                yield holders.get(name, self.agent), name, after

    def next_daemon(self) -> None:
        self.world.kill()
        self.world.begin()
        self.world.provider_ready()

    def assert_the_next_pod_has_it(self, number: int) -> None:
        self.assertEqual((self.kept(), self.volumes.at), ([], {}))
        sandbox = self.run_pod(pod(f"next{number}", uid=f"n{number}"))
        self.create(mounting(DATA), sandbox)
        self.assertEqual(self.volumes.at, {"vol-data": self.instance(sandbox)})
        self.stop(sandbox)
        self.assertEqual((self.kept(), self.volumes.at), ([], {}))

    def test_while_it_attaches(self) -> None:
        for number, (holder, name, after) in enumerate(self.steps("put_attachment", "attach", "mount_disk")):
            hung = self.hang(holder, name, after=after)
            creating = start(self.world.containers.create(self.sandbox, mounting(DATA, name=f"c{number}")))
            creating.addErrback(lambda _: None)
            self.assertFalse(creating.called, name)
            hung.restore()
            self.next_daemon()
            self.create(mounting(DATA, name=f"again{number}"))
            self.assertEqual(self.volumes.at, {"vol-data": self.instance(self.sandbox)})
            self.stop(self.sandbox)
            self.assert_the_next_pod_has_it(number)
            self.sandbox = self.run_pod(pod(f"web{number}", uid=f"w{number}"))
            self.watch_agent(self.sandbox)

    def test_while_it_detaches(self) -> None:
        steps = ("unmount_disk", "detach", "delete_attachment", "destroy")
        for number, (name, after) in enumerate([(name, after) for name in steps for after in (False, True)]):
            self.create(mounting(DATA))
            [(holder, _, _), _] = self.steps(name)
            hung = self.hang(holder, name, after=after)
            stopping = start(self.world.sandboxes.stop(self.sandbox))
            stopping.addErrback(lambda _: None)
            self.assertFalse(stopping.called, name)
            hung.restore()
            self.next_daemon()
            self.stop(self.sandbox)
            self.assert_the_next_pod_has_it(number)
            self.sandbox = self.run_pod(pod(f"web{number}", uid=f"w{number}"))
            self.watch_agent(self.sandbox)


class WithoutVolumesTests(PodsTestCase):
    def make_world(self) -> FakeNode:
        return NodeWithoutVolumes()

    def test_a_provider_that_has_none_says_so(self) -> None:
        sandbox = self.run_pod()
        creating = start(self.world.containers.create(sandbox, mounting(DATA)))
        error = self.failureResultOf(creating, FailedPrecondition).value
        self.assertIn("attaches no volumes", str(error))
        self.do(self.world.containers.create(sandbox, mounting("/etc/hosts")))
