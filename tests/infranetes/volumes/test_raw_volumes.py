# SPDX-License-Identifier: Apache-2.0
"""Raw volumes are containers' block devices: the VM's own, for a disk that is attached like any volume's."""

from __future__ import annotations

from infranetes_common.concurrency import start
from infranetes_common.errors import FailedPrecondition
from infranetes_common.volume_disks import serial_of
from infranetes_common.wire import cri
from tests.infranetes.pods.case import PodsTestCase
from tests.infranetes.pods.fakes import FakeNode, pod
from tests.infranetes.volumes.mounting_case import mounting
from tests.infranetes.volumes.pod_volumes_case import (
    DATA,
    DISK,
    RO_DISK,
    KilledCase,
    NodeWithoutVolumes,
    PodVolumesCase,
    with_devices,
)


class RawVolumeTests(PodVolumesCase):
    """Volumes as block devices of containers."""

    def test_the_container_gets_the_vms_device_with_the_permissions_asked(self) -> None:
        self.create(with_devices(DISK, "/dev/fuse", RO_DISK))
        disk, read_only = serial_of("vol-disk"), serial_of("vol-ro")
        found = [(one.host_path, one.container_path, one.permissions) for one in self.created[0].devices]
        self.assertEqual(
            found,
            [
                (f"/dev/{disk[:4]}", "/dev/x0", "mrw"),
                ("/dev/fuse", "/dev/x1", "mrw"),
                (f"/dev/{read_only[:4]}", "/dev/x2", "mr"),
            ],
        )
        self.assertEqual(
            [call for call in self.agent.calls if call[0] == "find" or call[0].startswith("mount")],
            [("find", disk), ("find", read_only)],
        )
        self.assertEqual(set(self.volumes.at), {"vol-disk", "vol-ro"})
        self.create(with_devices(DISK, name="other", permissions="r"))
        self.assertEqual(self.created[1].devices[0].permissions, "r")

    def test_what_nothing_was_asked_of_is_read_only_where_the_volume_is(self) -> None:
        for number, (asked, given) in enumerate({"": "rm", "w": "r", "rw": "r"}.items()):
            self.create(with_devices(RO_DISK, name=f"c{number}", permissions=asked))
            self.assertEqual(self.created[-1].devices[0].permissions, given)

    def test_it_goes_with_the_sandbox_and_is_flushed(self) -> None:
        self.create(with_devices(DISK))
        self.stop(self.sandbox)
        self.assertIn(("unmount", serial_of("vol-disk")), self.agent.calls)
        self.assertEqual((self.kept(), self.volumes.at), ([], {}))
        second = self.second_pod()
        self.create(with_devices(DISK), second)
        self.assertEqual(self.volumes.at, {"vol-disk": self.instance(second)})

    def test_another_pod_is_refused_and_the_device_named(self) -> None:
        self.create(with_devices(DISK))
        words = self.refused(FailedPrecondition, with_devices("/dev/fuse", DISK), self.second_pod())
        self.assertIn("one pod's at a time", words)
        self.assertIn(f"config.devices[1] ({DISK} at /dev/x1)", words)

    def test_a_mount_is_no_device_and_a_device_no_mount(self) -> None:
        self.assertIn("volumeDevices", self.refused(FailedPrecondition, mounting(DISK)))
        self.assertIn("volumeMounts", self.refused(FailedPrecondition, with_devices(DATA)))
        self.assertEqual((self.kept(), self.volumes.calls), ([], []))

    def test_the_users_of_a_user_namespace_are_told_that_they_may_not(self) -> None:
        userns = pod("mapped", uid="u3", annotations={"infranetes.io/containers": "oci"})
        options = userns.linux.security_context.namespace_options.userns_options
        options.mode = cri.POD
        for mappings in (options.uids, options.gids):
            mappings.add(container_id=0, host_id=65536, length=65536)
        wanted = with_devices(DISK)
        wanted.linux.security_context.namespace_options.userns_options.CopyFrom(options)
        words = self.refused(FailedPrecondition, wanted, self.run_pod(userns))
        self.assertIn("leave out hostUsers: false", words)
        self.assertEqual((self.kept(), self.volumes.calls), ([], []))


class NodeDeviceTests(PodVolumesCase):
    """The node's own block devices, which the provider may lend."""

    def test_one_that_is_lent_is_attached_like_a_raw_volume_and_the_containers_device(self) -> None:
        self.create(with_devices("/dev/sdb", "/dev/fuse"))
        serial = serial_of("device:/dev/sdb")
        [lent, own] = self.created[0].devices
        self.assertEqual((lent.host_path, lent.container_path), (f"/dev/{serial[:4]}", "/dev/x0"))
        self.assertEqual(own.host_path, "/dev/fuse")
        self.assertIn(("find", serial), self.agent.calls)
        self.assertEqual(self.kept(), [("device:/dev/sdb", self.instance(self.sandbox))])
        words = self.refused(FailedPrecondition, with_devices("/dev/sdb"), self.second_pod())
        self.assertIn("one pod's at a time", words)
        self.stop(self.sandbox)
        self.assertEqual((self.kept(), self.volumes.at), ([], {}))

    def test_a_mount_of_one_is_a_device_at_its_path(self) -> None:
        wanted = mounting("/etc/hosts", "/dev/sdb", DATA)
        wanted.mounts[1].readonly = True
        self.create(wanted)
        [config] = self.created
        self.assertEqual([one.container_path for one in config.mounts], ["/m0", "/m2"])
        found = [(one.container_path, one.permissions) for one in config.devices]
        self.assertEqual(found, [("/m1", "r")])

    def test_any_other_is_refused_by_name_and_nothing_attached(self) -> None:
        for lends in (True, False):
            self.volumes.lends = lends
            words = self.refused(FailedPrecondition, with_devices("/dev/fuse", "/dev/sdc"))
            self.assertIn("config.devices[1] (/dev/sdc at /dev/x1): /dev/sdc is not listed", words)
        self.assertEqual((self.kept(), self.volumes.calls, self.created), ([], [], []))

    def test_the_vms_own_devices_are_its_agents_concern(self) -> None:
        self.create(with_devices("/dev/fuse", "/dev/nvidia0"))
        self.assertEqual([one.host_path for one in self.created[0].devices], ["/dev/fuse", "/dev/nvidia0"])


class WithoutVolumesTests(PodsTestCase):
    def make_world(self) -> FakeNode:
        return NodeWithoutVolumes()

    def test_a_provider_that_lends_none_says_what_can_be_had(self) -> None:
        sandbox = self.run_pod()
        creating = start(self.world.containers.create(sandbox, with_devices("/dev/sdb")))
        words = str(self.failureResultOf(creating, FailedPrecondition).value)
        self.assertIn("/dev/sdb is a block device of the node", words)
        self.assertIn("volumeMode: Block", words)
        self.do(self.world.containers.create(sandbox, with_devices("/dev/fuse")))


class KilledAnywhereTests(KilledCase):
    """As for volumes that are mounted: none leaks, none is lost, none is attached twice."""

    def test_while_a_container_gets_a_device(self) -> None:
        for number, (holder, name, after) in enumerate(self.steps("put_attachment", "attach", "find_disk")):
            hung = self.hang(holder, name, after=after)
            creating = start(
                self.world.containers.create(self.sandbox, with_devices(DISK, name=f"c{number}"))
            )
            creating.addErrback(lambda _: None)
            self.assertFalse(creating.called, name)
            hung.restore()
            self.next_daemon()
            self.create(with_devices(DISK, name=f"again{number}"))
            self.assertEqual(self.volumes.at, {"vol-disk": self.instance(self.sandbox)})
            self.stop(self.sandbox)
            self.assert_the_next_pod_has_it(number)
            self.begin(f"web{number}", f"w{number}")
