# SPDX-License-Identifier: Apache-2.0
"""NFS volumes are mounted in their pod's VM before a container is created, and flushed before the VM ends."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from twisted.logger import capturedLogs

from infranetes.pods.node.hooks import PodFeature
from infranetes.volumes.nfs import NfsVolume
from infranetes.volumes.nfs_volumes import UNMOUNT_SECONDS, NfsVolumes
from infranetes_common.concurrency import start
from infranetes_common.errors import DeadlineExceeded, FailedPrecondition, NotOffered, Unavailable
from infranetes_common.filesync.wire import PREFIX
from infranetes_common.nfs import NfsMount, checked
from tests.infranetes.pods.fakes import FakeNode
from tests.infranetes.volumes.mounting_case import MountingCase, mounting

UID = "u1"
DATA = f"/pods/{UID}/volumes/kubernetes.io~nfs/data"
LOGS = f"/pods/{UID}/volumes/kubernetes.io~csi/logs/mount"
PART = f"/pods/{UID}/volume-subpaths/data/main/0"
FILES = f"/pods/{UID}/volumes/example.com~files/x"
OF_DATA = checked("files:/data", ("vers=4.2", "addr=192.0.2.7"))
OF_LOGS = checked("files:/logs", ("vers=4.2", "addr=192.0.2.7"))
MOUNTED: Mapping[str, NfsVolume] = {
    DATA: NfsVolume(OF_DATA, "", False),
    LOGS: NfsVolume(OF_LOGS, "", True),
    PART: NfsVolume(OF_DATA, "a/b", False),
}


class NfsNode(FakeNode):
    def make_features(self) -> list[PodFeature]:
        self.nfs_volumes = NfsVolumes(self.clock, self.find)
        return [self.nfs_volumes, *super().make_features()]

    async def find(self, path: str, uid: str) -> NfsVolume | None:
        return MOUNTED.get(path)


class NfsVolumesCase(MountingCase):
    """On a node with NFS volumes."""

    world: NfsNode

    def make_world(self) -> FakeNode:
        return NfsNode()

    def calls(self, word: str) -> list[tuple[str, str]]:
        return [call for call in self.agent.calls if call[0].startswith(word)]


class NfsVolumesTests(NfsVolumesCase):
    def test_the_vm_mounts_what_the_node_has_mounted_and_the_container_names_it(self) -> None:
        asked = mounting(DATA, "/etc/hosts", LOGS, PART)
        asked.mounts[3].readonly = True
        container = self.create(asked)
        [config] = self.created
        self.assertEqual(
            [(mount.host_path, mount.readonly) for mount in config.mounts],
            [
                (PREFIX + OF_DATA.id, False),
                ("/etc/hosts", False),
                (PREFIX + OF_LOGS.id, True),
                (f"{PREFIX}{OF_DATA.id}/a/b", True),
            ],
        )
        self.assertEqual(self.agent.nfs, {OF_DATA.id: {container}, OF_LOGS.id: {container}})

    def test_a_vm_that_has_rebooted_mounts_again_what_its_running_containers_have(self) -> None:
        ended = self.create(mounting(LOGS))
        container = self.create(mounting(DATA, "/etc/hosts", PART, name="second"))
        self.do(self.world.containers.start(container))
        self.do(self.world.containers.start(ended))
        self.do(self.world.containers.stop(ended, 1))
        for _ in range(2):
            self.agent.nfs.clear()
            self.world.restart()
            self.assertEqual(self.agent.nfs, {OF_DATA.id: {container}})
        self.agent.mount_error = DeadlineExceeded("the server does not answer")
        self.world.restart()  # which is logged
        self.agent.mount_error = None

    def test_a_volume_that_is_not_nfs_is_left_as_it_is(self) -> None:
        self.create(mounting(FILES))
        self.assertEqual(self.created[0].mounts[0].host_path, FILES)
        self.assertEqual(self.agent.nfs, {})

    def test_a_server_that_is_gone_is_said_and_nothing_is_left_of_the_container(self) -> None:
        self.agent.mount_error = DeadlineExceeded("the server does not answer")
        words = self.refused(DeadlineExceeded, mounting("/etc/hosts", DATA))
        self.assertIn(f"config.mounts[1] ({DATA} at /m1): the server does not answer", words)
        self.assertEqual(self.world.store.contents().containers, ())
        self.agent.mount_error = None
        self.create(mounting(DATA))

    def test_what_was_mounted_is_given_up_when_the_next_step_fails(self) -> None:
        self.agent.create_error = Unavailable("no room")
        self.refused(Unavailable, mounting(DATA))
        self.assertEqual(self.agent.nfs, {})
        mount_nfs = self.agent.mount_nfs

        async def one_mount(container_id: str, mount: NfsMount) -> str:
            id = await mount_nfs(container_id, mount)
            self.agent.mount_error = FailedPrecondition("no such directory")
            return str(id)

        self.patch(self.agent, "mount_nfs", one_mount)
        self.refused(FailedPrecondition, mounting(DATA, LOGS))
        self.assertEqual((len(self.calls("mount_nfs")), self.agent.nfs), (3, {}))

    def test_mapped_ids_are_refused(self) -> None:
        self.create(mounting("/etc/hosts"))
        [container] = self.world.node.inventory.sandboxes[self.sandbox].containers.values()
        nfs = self.world.nfs_volumes
        for kind in ("uidMappings", "gidMappings"):
            mounts = mounting(DATA)
            getattr(mounts.mounts[0], kind).add(container_id=0, host_id=65536, length=65536)
            error = self.failureResultOf(start(nfs.prepare(container, mounts)), FailedPrecondition)
            self.assertIn("hostUsers: false", str(error.value))

    def test_what_is_pending_is_written_before_the_vm_ends(self) -> None:
        self.create(mounting(DATA))
        destroyed: list[tuple[int, int]] = []
        self.patch(self.agent, "unmount_nfs", self.noting(destroyed))
        self.stop()
        self.assertEqual(destroyed, [(UNMOUNT_SECONDS, 0)])

    def noting(self, seen: list[tuple[int, int]]) -> Callable[[int], Awaitable[None]]:
        async def unmount_nfs(within: int) -> None:
            seen.append((within, len([one for one in self.world.provider.calls if one[0] == "destroy"])))

        return unmount_nfs

    def test_a_pod_ends_though_its_server_is_gone_and_the_log_says_what_that_means(self) -> None:
        for name, error, said in (
            ("web", Unavailable("gone"), ["gone"]),
            ("old", NotOffered("UnmountNfs"), []),
        ):
            if name != "web":
                self.begin(name)
            self.create(mounting(DATA))
            self.agent.unmount_error = error
            with capturedLogs() as logged:
                self.stop()
            self.assertEqual(self.world.provider.instances, {})
            last = [str(one["error"]) for one in logged if "the last writes" in str(one["log_format"])]
            self.assertEqual(last, said)

    def test_a_pod_without_nfs_is_not_asked(self) -> None:
        self.create(mounting("/etc/hosts"))
        self.stop()
        self.assertEqual(self.calls("unmount_nfs"), [])


class KilledAnywhereTests(NfsVolumesCase):
    """The daemon is killed before or after each step: the next one goes on, and nothing outlives the pod."""

    def test_while_it_mounts(self) -> None:
        for after in (False, True):
            hung = self.hang(self.agent, "mount_nfs", after=after)
            creating = start(self.world.containers.create(self.sandbox, mounting(DATA)))
            creating.addErrback(lambda _: None)
            self.assertFalse(creating.called)
            hung.restore()
            self.next_daemon()
            container = self.create(mounting(DATA))
            self.assertIn(container, self.agent.nfs[OF_DATA.id])
            self.stop()
            self.assertEqual(self.agent.nfs, {})
            self.begin(f"next{after}")

    def test_while_it_unmounts(self) -> None:
        for after in (False, True):
            self.create(mounting(DATA))
            hung = self.hang(self.agent, "unmount_nfs", after=after)
            stopping = start(self.world.sandboxes.stop(self.sandbox))
            stopping.addErrback(lambda _: None)
            self.assertFalse(stopping.called)
            hung.restore()
            self.next_daemon()
            self.stop()
            self.assertEqual((self.agent.nfs, self.world.provider.instances), ({}, {}))
            self.begin(f"next{after}")
