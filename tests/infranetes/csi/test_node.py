# SPDX-License-Identifier: Apache-2.0
"""CSI's node service publishes volumes for kubelet."""

from __future__ import annotations

import os
import secrets
import stat

from twisted.trial.unittest import TestCase

from infranetes.csi.interface import VolumeUse
from infranetes.daemon.csi import MountedVolumes
from infranetes.volumes import published_devices
from infranetes.volumes.mount_table import MountTable
from infranetes.volumes.published import PublishedVolume, read
from infranetes_common.errors import Unavailable
from infranetes_common.wire import csi, pluginregistration, vmserver
from tests.harness.needs import needs_mounts, needs_root
from tests.infranetes.csi.case import NODE, CsiCase, Pods, capability, raw
from tests.support.loop_devices import left_of
from txgrpc import Code

_MODE = csi.VolumeCapability.AccessMode
_RPC = csi.NodeServiceCapability.RPC


@needs_root
class NodeCase(CsiCase):
    async def setUp(self) -> None:
        await super().setUp()
        # Those of this test alone: tests that run beside it publish volumes on the same machine.
        name, size = f"data-{secrets.token_hex(4)}", csi.CapacityRange(required_bytes=1 << 20)
        self.volume = (await self.create(name, capacity_range=size)).volume_id

    def there(self, target: str = "") -> PublishedVolume | None:
        table = MountTable()
        try:
            return read(target or self.target(), table)
        finally:
            table.close()


@needs_mounts
class PublishTests(NodeCase):
    async def test_the_path_stands_for_the_volume_until_it_is_unpublished(self) -> None:
        for _ in range(2):
            await self.publish(self.volume)
            self.assertEqual(self.there(), PublishedVolume(self.volume))
        for _ in range(2):
            await self.unpublish(self.volume)
            self.assertFalse(os.path.exists(self.target()))

    async def test_all_that_is_asked_of_it_is_told(self) -> None:
        asked = capability(fs_type="xfs", mount_flags=["noatime", "rw"], volume_mount_group="2000")
        await self.publish(self.volume, volume_capability=asked, readonly=True)
        self.assertEqual(self.there(), PublishedVolume(self.volume, "xfs", ("noatime",), True, 2000))

    async def test_a_mode_that_only_reads_is_read_only(self) -> None:
        await self.publish(self.volume, volume_capability=capability(_MODE.SINGLE_NODE_READER_ONLY))
        self.assertEqual(self.there(), PublishedVolume(self.volume, read_only=True))

    async def test_in_another_way_it_is_refused(self) -> None:
        await self.publish(self.volume)
        await self.refused(Code.ALREADY_EXISTS, self.publish(self.volume, readonly=True))
        self.assertEqual(self.there(), PublishedVolume(self.volume))

    async def test_a_second_pod_waits_until_the_first_has_gone(self) -> None:
        second = self.target("pod-2")
        for mode in (_MODE.SINGLE_NODE_SINGLE_WRITER, _MODE.SINGLE_NODE_MULTI_WRITER):
            asked = capability(mode)
            await self.publish(self.volume, volume_capability=asked)
            await self.refused(
                Code.FAILED_PRECONDITION,
                self.publish(self.volume, second, volume_capability=asked),
                "one pod's",
            )
            self.assertFalse(os.path.exists(second))
            await self.unpublish(self.volume)
            await self.publish(self.volume, second, volume_capability=asked)
            await self.unpublish(self.volume, second)

    async def test_a_path_with_another_volume_is_left_alone(self) -> None:
        await self.create("other", capacity_range=csi.CapacityRange(required_bytes=1 << 20))
        await self.publish(self.volume)
        await self.refused(Code.FAILED_PRECONDITION, self.publish("other"))
        await self.refused(Code.FAILED_PRECONDITION, self.unpublish("other"))
        self.assertEqual(self.there(), PublishedVolume(self.volume))

    async def test_what_cannot_be_is_refused(self) -> None:
        for volume_id in ("none", "../data", "a b"):
            await self.refused(Code.NOT_FOUND, self.publish(volume_id))
        for volume_id in ("", "x" * 129):
            await self.refused(Code.INVALID_ARGUMENT, self.publish(volume_id))
            await self.refused(Code.INVALID_ARGUMENT, self.unpublish(volume_id))
        for target in ("relative", "/", "/a\nb", "/" + "x" * 4096):
            await self.refused(Code.INVALID_ARGUMENT, self.publish(self.volume, target))
            await self.refused(Code.INVALID_ARGUMENT, self.unpublish(self.volume, target))
        wrong = [capability(volume_mount_group=each) for each in ("-1", "x", "4294967295", "1" * 5000)]
        wrong += [capability(mount_flags=["a,b"]), capability(_MODE.MULTI_NODE_MULTI_WRITER)]
        for each in wrong:
            call = self.publish(self.volume, volume_capability=each)
            await self.refused(Code.INVALID_ARGUMENT, call)
        request = csi.NodePublishVolumeRequest(volume_id=self.volume, target_path=self.target())
        await self.refused(Code.INVALID_ARGUMENT, self.node.NodePublishVolume(request, timeout=60))
        self.assertFalse(os.path.exists(self.target()))

    async def test_a_published_volume_outlives_the_driver(self) -> None:
        await self.publish(self.volume)
        await self.service.stopService()
        await self.start()
        await self.publish(self.volume)
        await self.unpublish(self.volume)
        self.assertFalse(os.path.exists(self.target()))

    async def test_without_pods_nothing_is_said_of_them(self) -> None:
        found = await self.node.NodeGetCapabilities(csi.NodeGetCapabilitiesRequest(), timeout=60)
        offered = {each.rpc.type for each in found.capabilities}
        self.assertEqual(offered, {_RPC.VOLUME_MOUNT_GROUP, _RPC.SINGLE_NODE_MULTI_WRITER})
        request = csi.NodeGetVolumeStatsRequest(volume_id=self.volume, volume_path=self.target())
        await self.refused(Code.UNIMPLEMENTED, self.node.NodeGetVolumeStats(request, timeout=60))


@needs_mounts
class RawTests(NodeCase):
    """Raw block volumes (volumeMode: Block)."""

    pods = Pods()

    async def publish_raw(self, target: str = "", mode: int = _MODE.SINGLE_NODE_WRITER) -> None:
        await self.publish(self.volume, target, volume_capability=raw(mode))

    async def test_the_path_is_a_device_until_it_is_unpublished(self) -> None:
        for _ in range(2):
            await self.publish_raw()
            self.assertTrue(stat.S_ISBLK(os.stat(self.target()).st_mode))
            self.assertEqual(published_devices.read(self.target()), PublishedVolume(self.volume, ""))
        for _ in range(2):
            await self.unpublish(self.volume)
            self.assertFalse(os.path.exists(self.target()))
            self.assertEqual(left_of(self.loop_devices), [])

    async def test_a_mode_that_only_reads_is_read_only(self) -> None:
        await self.publish_raw(mode=_MODE.SINGLE_NODE_READER_ONLY)
        wanted = PublishedVolume(self.volume, "", read_only=True)
        self.assertEqual(published_devices.read(self.target()), wanted)

    async def test_one_volume_is_never_both_mounted_and_raw(self) -> None:
        other = self.target("pod-2")
        await self.publish_raw()
        await self.refused(Code.FAILED_PRECONDITION, self.publish(self.volume, other), "one pod's")
        await self.refused(Code.FAILED_PRECONDITION, self.publish_raw(other), "one pod's")
        await self.refused(Code.ALREADY_EXISTS, self.publish(self.volume))
        await self.unpublish(self.volume)
        await self.publish(self.volume, other)
        await self.refused(Code.FAILED_PRECONDITION, self.publish_raw(), "one pod's")
        await self.refused(Code.ALREADY_EXISTS, self.publish_raw(other))
        self.assertEqual(left_of(self.loop_devices), [])

    async def test_a_path_with_another_volume_is_left_alone(self) -> None:
        await self.create("other", capacity_range=csi.CapacityRange(required_bytes=1 << 20))
        await self.publish_raw()
        await self.refused(Code.FAILED_PRECONDITION, self.unpublish("other"))
        self.assertEqual(len(self.loop_devices()), 1)

    async def test_it_outlives_the_driver(self) -> None:
        await self.publish_raw()
        await self.service.stopService()
        await self.start()
        await self.publish_raw()
        await self.unpublish(self.volume)
        self.assertEqual(left_of(self.loop_devices), [])

    async def test_its_size_is_told_and_grows(self) -> None:
        await self.publish_raw()
        request = csi.NodeGetVolumeStatsRequest(volume_id=self.volume, volume_path=self.target())
        [usage] = (await self.node.NodeGetVolumeStats(request, timeout=60)).usage
        self.assertEqual((usage.unit, usage.total), (csi.VolumeUsage.BYTES, 1 << 20))
        growing = csi.NodeExpandVolumeRequest(volume_id=self.volume, volume_path=self.target())
        self.assertEqual((await self.node.NodeExpandVolume(growing, timeout=60)).capacity_bytes, 1 << 20)
        self.assertEqual(self.pods.grown, [self.volume])


@needs_mounts
class PodsTests(NodeCase):
    async def setUp(self) -> None:
        self.pods = Pods()
        await super().setUp()

    async def stats(self, path: str, volume_id: str = "") -> csi.NodeGetVolumeStatsResponse:
        request = csi.NodeGetVolumeStatsRequest(volume_id=volume_id or self.volume, volume_path=path)
        response: csi.NodeGetVolumeStatsResponse = await self.node.NodeGetVolumeStats(request, timeout=60)
        return response

    async def test_the_use_is_the_vms(self) -> None:
        await self.publish(self.volume)
        usage = (await self.stats(self.target())).usage
        found = [(each.unit, each.total, each.used, each.available) for each in usage]
        unit = csi.VolumeUsage
        self.assertEqual(found, [(unit.BYTES, 1000, 300, 700), (unit.INODES, 50, 20, 30)])

    async def test_what_a_pod_wrote_is_on_the_disk_before_the_path_is_taken_away(self) -> None:
        assert self.pods is not None
        await self.publish(self.volume)
        for _ in range(2):
            await self.unpublish(self.volume)
        target = self.target()
        self.assertEqual(self.pods.flushed, [(self.volume, target, True), (self.volume, target, False)])

    async def test_where_nothing_is_published_there_is_none(self) -> None:
        await self.publish(self.volume)
        for path in ("some/path", "/some/path", str(self.root)):
            await self.refused(Code.NOT_FOUND, self.stats(path))
        await self.refused(Code.NOT_FOUND, self.stats(self.target(), "other"))
        await self.refused(Code.INVALID_ARGUMENT, self.stats(""))

    async def test_a_vm_that_does_not_answer_is_told(self) -> None:
        await self.publish(self.volume)
        assert self.pods is not None
        self.pods.error = Unavailable("it does not answer")
        await self.refused(Code.UNAVAILABLE, self.stats(self.target()), "does not answer")

    async def test_the_file_system_grows_with_the_disk(self) -> None:
        await self.publish(self.volume)
        request = csi.NodeExpandVolumeRequest(volume_id=self.volume, volume_path=self.target())
        for _ in range(2):
            found = await self.node.NodeExpandVolume(request, timeout=60)
            self.assertEqual(found.capacity_bytes, 1 << 20)
        assert self.pods is not None
        self.assertEqual(self.pods.grown, [self.volume] * 2)
        request.volume_id = "other"
        await self.refused(Code.NOT_FOUND, self.node.NodeExpandVolume(request, timeout=60))


class Measuring:
    """Knows one volume that a VM has. :ivar grown: how often its file system was enlarged.

    :ivar flushed: which volume was to be flushed, and for which path."""

    def __init__(self) -> None:
        self.grown = 0
        self.flushed: list[tuple[str, str]] = []

    async def flush(self, volume: str, target: str) -> None:
        self.flushed.append((volume, target))

    async def usage(self, volume: str, *, grow: bool = False) -> vmserver.DiskUsageResponse | None:
        if volume != "data":
            return None
        self.grown += grow
        return vmserver.DiskUsageResponse(
            total_bytes=1000, used_bytes=300, available_bytes=650, inodes=50, free_inodes=20
        )


class MountedTests(TestCase):
    async def test_what_the_agent_measures_is_told(self) -> None:
        measuring = Measuring()
        mounted = MountedVolumes(measuring)
        self.assertEqual(await mounted.usage("data"), VolumeUse(1000, 300, 650, 50, 30, 20))
        self.assertEqual(measuring.grown, 0)
        await mounted.grow("data")
        self.assertEqual(measuring.grown, 1)

    async def test_what_is_taken_away_is_written_by_the_vm(self) -> None:
        measuring = Measuring()
        await MountedVolumes(measuring).flush("data", "/pods/one")
        self.assertEqual(measuring.flushed, [("data", "/pods/one")])

    async def test_a_volume_that_no_vm_has_grows_later_and_cannot_be_measured(self) -> None:
        mounted = MountedVolumes(Measuring())
        await mounted.grow("other")
        with self.assertRaises(Unavailable):
            await mounted.usage("other")


class AboutTests(CsiCase):
    async def test_the_node_is_named_and_placed(self) -> None:
        found = await self.node.NodeGetInfo(csi.NodeGetInfoRequest(), timeout=60)
        self.assertEqual(found.node_id, NODE)
        self.assertEqual(dict(found.accessible_topology.segments), {"infranetes.io/node": NODE})

    async def test_it_is_ready_once_the_provider_is(self) -> None:
        self.assertTrue((await self.identity.Probe(csi.ProbeRequest(), timeout=60)).ready.value)
        self.ready = False
        self.assertFalse((await self.identity.Probe(csi.ProbeRequest(), timeout=60)).ready.value)

    async def test_kubelet_is_shown_the_driver_and_says_what_it_thinks(self) -> None:
        found = await self.registration.GetInfo(pluginregistration.InfoRequest(), timeout=60)
        self.assertEqual((found.type, found.name), ("CSIPlugin", "infranetes.io"))
        self.assertEqual((found.endpoint, found.supported_versions), (self.config.socket, ["1.0.0"]))
        name = (await self.identity.GetPluginInfo(csi.GetPluginInfoRequest(), timeout=60)).name
        self.assertEqual(name, found.name)
        for taken in (True, False):
            status = pluginregistration.RegistrationStatus(plugin_registered=taken, error="why")
            await self.registration.NotifyRegistrationStatus(status, timeout=60)

    async def test_nobody_but_root_may_call(self) -> None:
        for path in (self.config.socket, self.config.registration_socket):
            self.assertEqual(os.stat(path).st_mode & 0o777, 0o600)
