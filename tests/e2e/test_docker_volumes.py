# SPDX-License-Identifier: Apache-2.0
"""Volumes of pods whose containers Docker runs: with a file system, raw, and a device of the node's."""

from __future__ import annotations

from infranetes_common.wire import cri
from tests.e2e.pod_case import DOCKER_ALONE
from tests.e2e.test_block_volumes import OWNER, READ, TEXT, WRITE, WRITE_AS_USER
from tests.e2e.volume_case import DISK_GROUP, GROUP, RawVolumeCase, VolumeCase, of_user
from tests.harness.durations import slow


@slow(120, "its VMs are emulated where there is no KVM")
class DockerVolumeTests(VolumeCase, RawVolumeCase):
    """Volumes in a guest image that has only Docker."""

    images = DOCKER_ALONE
    contprovider = "docker"

    async def test_a_pod_has_all_kinds_of_them_and_the_next_one_what_it_wrote(self) -> None:
        await self.start()
        first = await self.run_pod()
        script = f"echo kept >/data/file; sync; ls -ld /data; {WRITE}"
        config = self.mounting(self.publish("first", group=GROUP), "main", script)
        raw = self.raw_volume(self.publish_raw("first"))
        config.devices.extend([raw, self.lent_device()])
        await self.run_container(first, config)
        await self.until(lambda: self.lines("main")[1:] == ["written"], "it is written", seconds=60.0)
        self.assertRegex(self.lines("main")[0], rf"^drwxrws.* {GROUP} ")
        for name, groups, said in (("without", (), "n"), ("with", (DISK_GROUP,), "y")):
            user = self.box(name, WRITE_AS_USER, devices=[raw], linux=of_user(*groups))
            await self.in_state(await self.run_container(first, user), cri.CONTAINER_EXITED)
            self.assertEqual(self.lines(name), [said])
        self.assertFalse(self.is_free(), "no other VM gets it")
        await self.stop_pod(first)
        await self.remove_pod(first)
        self.assertTrue(self.is_free())
        self.assertIn(TEXT.encode(), self.raw_file.read_bytes())
        self.assertEqual(self.node_disk.read_bytes()[:4], b"lent")
        self.unpublish_raw("first")

        second = await self.run_pod("web", attempt=1)
        reading = self.mounting(self.publish("second", group=GROUP), "second", f"cat /data/file; {READ}")
        reading.mounts[0].readonly = True
        reading.devices.append(self.raw_volume(self.publish_raw("second", read_only=True)))
        await self.run_container(second, reading)
        await self.until(
            lambda: self.lines("second") == ["kept", OWNER, TEXT, "refused"],
            "the second pod, which may only read, sees it",
            seconds=60.0,
        )
        await self.stop_pod(second)
        self.assertNotIn(b"lost", self.raw_file.read_bytes())
