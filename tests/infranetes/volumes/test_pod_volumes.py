# SPDX-License-Identifier: Apache-2.0
"""Volumes are attached to their pod's VM, to one VM at a time, and are free again once the pod is stopped."""

from __future__ import annotations

from collections.abc import Sequence

from twisted.internet.defer import Deferred, fail
from twisted.python.monkey import MonkeyPatcher

from infranetes.pods.store.records import AttachmentRecord, Contents
from infranetes.volumes.published import PublishedVolume
from infranetes_common.concurrency import Event, start
from infranetes_common.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InfranetesError,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from infranetes_common.filesync.wire import PREFIX
from infranetes_common.volume_disks import serial_of
from infranetes_common.wire import cri
from tests.infranetes.pods.case import PodsTestCase
from tests.infranetes.pods.fakes import FakeNode, pod
from tests.infranetes.volumes.mounting_case import mounting
from tests.infranetes.volumes.pod_volumes_case import (
    DATA,
    LOGS,
    KilledCase,
    NodeWithoutVolumes,
    PodVolumesCase,
)


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

    def test_a_pod_that_has_one_can_not_be_kept(self) -> None:
        self.create(mounting(DATA))
        for container in self.world.node.inventory.containers.values():
            failure = self.failureResultOf(start(self.pod_volumes.volumes_of(container)), FailedPrecondition)
            self.assertIn("vol-data", str(failure.value))

    def test_a_vm_that_has_booted_again_mounts_it_for_the_next_container(self) -> None:
        self.create(mounting(DATA))
        self.agent.disks.clear()
        self.create(mounting(DATA, name="again"))
        self.assertEqual([call[0].partition(" ")[0] for call in self.agent.calls].count("mount"), 2)
        self.assertEqual(self.volumes.at, {"vol-data": self.instance(self.sandbox)})
        self.assertEqual(len(self.kept()), 1)

    def test_the_record_is_there_before_the_provider_is_asked(self) -> None:
        seen = []
        attach = self.volumes.attach

        def looking(instance: str, volume: str, read_only: bool) -> Deferred[str]:
            seen.append(self.kept())
            return attach(instance, volume, read_only)

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

    def test_another_tenants_is_refused_before_it_is_recorded(self) -> None:
        async def find(paths: Sequence[str]) -> list[PublishedVolume | None]:
            return [PublishedVolume("acme:vol-1", "ext4") for _ in paths]

        providers = self.world.node.providers
        providers.by_name["fake/acme"] = providers.own  # the provider has this tenant, and the pod is of none
        self.patch(self.world.pod_volumes, "_find", find)
        words = self.refused(FailedPrecondition, mounting(DATA))
        self.assertIn("volume acme:vol-1 is of tenant acme, and the pod of no tenant", words)
        self.assertEqual((self.kept(), self.volumes.calls), ([], []))

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

    def target(self) -> str:
        """Return where kubelet has the pod's volume."""
        uid = self.world.node.inventory.sandboxes[self.sandbox].config.metadata.uid
        return f"/pods/{uid}/volumes/kubernetes.io~csi/data/mount"

    def flush(self, target: str) -> list[str]:
        """Flush the volume published there before it is unpublished. Return the disks that are flushed."""
        self.successResultOf(start(self.world.pod_volumes.flush("vol-data", target)))
        return [call[1] for call in self.agent.calls if call[0] == "sync"]

    def test_what_a_pod_has_yet_to_write_is_written_when_kubelet_takes_its_volume_away(self) -> None:
        self.assertEqual(self.flush(self.target()), [])
        self.create(mounting(DATA))
        serial = serial_of("vol-data")
        self.assertEqual(self.flush(self.target()), [serial])
        self.assertEqual(self.flush(self.target()), [serial] * 2)
        self.assertEqual(self.flush("/pods/another/volumes/kubernetes.io~csi/data/mount"), [serial] * 2)
        self.assertEqual(self.kept(), [("vol-data", self.instance(self.sandbox))], "it is the pod's still")
        self.stop(self.sandbox)
        self.assertEqual(self.flush(self.target()), [serial] * 2)

    def test_a_volume_is_taken_away_though_its_vm_can_not_write(self) -> None:
        self.create(mounting(DATA))
        for error in (
            Unavailable("an error of the disk"),
            NotFound("none"),
        ):
            self.agent.sync_error = error
            self.flush(self.target())
        asked = len(self.flush(self.target()))
        self.agent.go_away()
        self.assertEqual(len(self.flush(self.target())), asked, "nobody is waited for")

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
        words = self.refused(FailedPrecondition, mapped, self.run_pod(userns))
        self.assertIn("leave out hostUsers: false", words)
        self.assertEqual((self.kept(), self.volumes.calls), ([], []))

    def refuse_records(self, *, with_serial: bool) -> MonkeyPatcher:
        """Have the store refuse the records of volumes, or only of those that are attached."""
        put = self.world.store.put_attachment

        async def refusing(record: AttachmentRecord) -> None:
            if bool(record.serial) == with_serial:
                raise ResourceExhausted("the disk is full")
            await put(record)

        patched: MonkeyPatcher = self.patch(self.world.store, "put_attachment", refusing)
        return patched

    def test_what_can_not_be_recorded_is_not_attached_and_nobodys(self) -> None:
        refusing = self.refuse_records(with_serial=False)
        self.assertIn("the disk is full", self.refused(ResourceExhausted, mounting(DATA)))
        self.assertEqual((self.volumes.calls, self.pod_volumes.user_of("vol-data")), ([], ""))
        refusing.restore()
        self.create(mounting(DATA), self.second_pod())

    def test_one_whose_serial_number_can_not_be_recorded_stays_the_pods(self) -> None:
        refusing = self.refuse_records(with_serial=True)
        self.refused(ResourceExhausted, mounting(DATA))
        self.assertEqual(self.kept(), [("vol-data", self.instance(self.sandbox))])
        self.assertIsNone(self.do(self.pod_volumes.usage("vol-data")), "as it is recorded")
        self.assertIn("one pod's", self.refused(FailedPrecondition, mounting(DATA), self.second_pod()))
        refusing.restore()
        self.create(mounting(DATA))

    def test_one_that_is_attached_already_stays_so_when_it_is_asked_for_in_vain(self) -> None:
        self.create(mounting(DATA))
        self.volumes.attach_error = FailedPrecondition("no")
        self.refused(FailedPrecondition, mounting(DATA, name="again"))
        self.assertEqual(self.kept(), [("vol-data", self.instance(self.sandbox))])
        self.stop(self.sandbox)
        self.assertEqual((self.kept(), self.volumes.at), ([], {}))

    def test_of_a_vm_that_is_no_more_it_is_freed_by_the_first_pass_after_its_providers_start(self) -> None:
        record = AttachmentRecord("vol-data", "fake", "old", "i-1", serial="s")
        self.do(self.pod_volumes.load(Contents(attachments=(record,))))
        self.world.node_provider.ready = Event()
        self.do(self.pod_volumes.sweep())
        self.assertEqual(self.volumes.calls, [])
        self.world.node_provider.ready.succeed(None)
        self.do(self.pod_volumes.sweep())
        self.assertEqual(self.volumes.calls, [("detach", "i-1", "vol-data")])
        self.assertEqual(self.pod_volumes.user_of("vol-data"), "")

    def test_one_of_a_provider_that_is_no_more_says_so(self) -> None:
        record = AttachmentRecord("vol-data", "gone", "old", "i-1", serial="s")
        self.do(self.pod_volumes.load(Contents(attachments=(record,))))
        self.assertEqual(self.pod_volumes.user_of("vol-data"), "sandbox old")
        words = self.refused(FailedPrecondition, mounting(DATA))
        self.assertIn("provider gone, which is not configured any more", words)
        self.assertIsNone(self.do(self.pod_volumes.usage("vol-data")))
        self.assertEqual(self.flush(self.target()), [])

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


class LooksTests(PodVolumesCase):
    def test_a_path_at_which_nothing_can_be_told_is_its_mounts_trouble(self) -> None:
        async def find(paths: Sequence[str]) -> list[PublishedVolume | InfranetesError | None]:
            return [DeadlineExceeded("/far does not answer") if path == "/far" else None for path in paths]

        self.patch(self.world, "find", find)
        self.world.restart()
        words = self.refused(DeadlineExceeded, mounting("/near", "/far"))
        self.assertIn("config.mounts[1] (/far at /m1): /far does not answer", words)


class KilledAnywhereTests(KilledCase):
    """The daemon is killed before or after each step: no volume leaks, none is lost, none attached twice."""

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
            self.begin(f"web{number}", f"w{number}")

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
            self.begin(f"web{number}", f"w{number}")


class WithoutVolumesTests(PodsTestCase):
    def make_world(self) -> FakeNode:
        return NodeWithoutVolumes()

    def test_a_provider_that_has_none_says_so(self) -> None:
        sandbox = self.run_pod()
        creating = start(self.world.containers.create(sandbox, mounting(DATA)))
        error = self.failureResultOf(creating, FailedPrecondition).value
        self.assertIn("attaches no volumes", str(error))
        self.do(self.world.containers.create(sandbox, mounting("/etc/hosts")))
