# SPDX-License-Identifier: Apache-2.0
"""Raw volumes of real VMs: containers write to the disk itself, and the next pod finds what they wrote."""

from __future__ import annotations

from infranetes_common.wire import cri
from tests.e2e.volume_case import DISK_GROUP, RawVolumeCase, of_user

OWNER = f"0 {DISK_GROUP} 660"
TEXT = "kept by the disk itself"
WRITE = (
    f"echo '{TEXT}' | dd of=/dev/xvda bs=512 seek=8 conv=notrunc 2>/dev/null && "
    "echo lent | dd of=/dev/node bs=512 2>/dev/null && "
    "test -b /dev/xvda && echo written; exec sleep 1000"
)
WRITE_AS_USER = (
    "if id -u | dd of=/dev/xvda bs=512 seek=16 conv=notrunc 2>/dev/null; then echo y; else echo n; fi"
)
READ = (
    "stat -c '%u %g %a' /dev/xvda; "
    "dd if=/dev/xvda bs=512 skip=8 count=1 2>/dev/null | tr -d '\\000'; "
    "if echo lost | dd of=/dev/xvda bs=512 2>/dev/null; then echo written; else echo refused; fi; "
    "exec sleep 1000"
)


class BlockVolumeTests(RawVolumeCase):
    async def test_what_is_written_to_the_device_outlives_the_pod_and_its_vm(self) -> None:
        """A user other than root may open it with its group."""
        await self.start()
        first = await self.run_pod()
        link = self.publish_raw("first")
        wanted = self.box("main", WRITE, devices=[self.raw_volume(link), self.lent_device()])
        await self.run_container(first, wanted)
        await self.until(lambda: self.lines("main") == ["written"], "it is written", seconds=60.0)
        for name, groups, said in (("without", (), "n"), ("with", (DISK_GROUP,), "y")):
            user = self.box(name, WRITE_AS_USER, devices=[self.raw_volume(link)], linux=of_user(*groups))
            await self.in_state(await self.run_container(first, user), cri.CONTAINER_EXITED)
            self.assertEqual(self.lines(name), [said])
        await self.stop_pod(first)
        await self.remove_pod(first)
        content = self.raw_file.read_bytes()
        self.assertIn(TEXT.encode(), content)
        self.assertEqual(content[16 * 512 :][:5], b"1000\n")
        self.assertLess(self.raw_file.stat().st_blocks * 512, self.raw_size / 2, "no file system was made")
        self.assertEqual(self.node_disk.read_bytes()[:4], b"lent")
        self.unpublish_raw("first")

        second = await self.run_pod("web", attempt=1)
        link = self.publish_raw("second", read_only=True)
        await self.run_container(second, self.box("second", READ, devices=[self.raw_volume(link)]))
        await self.until(
            lambda: self.lines("second") == [OWNER, TEXT, "refused"],
            "the second pod, which may only read, sees it",
            seconds=60.0,
        )
        await self.stop_pod(second)
        self.assertNotIn(b"lost", self.raw_file.read_bytes())
