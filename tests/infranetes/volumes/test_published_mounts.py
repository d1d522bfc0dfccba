# SPDX-License-Identifier: Apache-2.0
"""What is at the node's paths that containers mount."""

from __future__ import annotations

import os
import secrets
import subprocess
from pathlib import Path

from twisted.trial.unittest import TestCase

from infranetes.volumes import published, published_devices
from infranetes.volumes.mount_table import MountTable
from infranetes.volumes.published import PublishedVolume
from infranetes.volumes.published_mounts import PublishedMounts
from infranetes_common.errors import FailedPrecondition
from infranetes_common.reactors import installed
from tests.harness.needs import needs_mounts


@needs_mounts
class PublishedMountsTests(TestCase):
    def setUp(self) -> None:
        self.top = Path(os.path.realpath(self.mktemp()))
        self.top.mkdir(parents=True)
        self.found = PublishedMounts(installed())
        self.addCleanup(self.found.close)
        self.table = MountTable()
        self.addCleanup(self.table.close)

    async def test_volumes_of_both_kinds_are_found_and_are_their_pods(self) -> None:
        uid = f"uid-{secrets.token_hex(4)}"
        raw, mounted = PublishedVolume(f"a-{uid}", ""), PublishedVolume(f"b-{uid}")
        device = self.top / "publish" / "pv" / uid
        directory = self.top / "pods" / uid / "volumes" / "kubernetes.io~csi" / "pv" / "mount"
        published_devices.publish(str(device), raw, self.table)
        self.addCleanup(published_devices.unpublish, str(device), self.table)
        published.publish(str(directory), mounted, self.table)
        self.addCleanup(published.unpublish, str(directory), self.table)
        (self.top / "link").symlink_to(device)
        paths = [str(directory), str(self.top / "link"), "", str(self.top), str(self.top / "missing")]
        self.assertEqual(await self.found.find(paths), [mounted, raw, None, None, None])
        self.assertEqual(await self.found.find_for_pod(uid), [raw, mounted])

    async def test_one_that_can_not_be_looked_at_is_an_error_and_hides_no_other(self) -> None:
        volume = PublishedVolume("v")

        def read(path: str) -> PublishedVolume | None:
            if path == "/bad":
                raise FailedPrecondition("it is damaged")
            if path == "/bug":
                raise ZeroDivisionError
            return volume

        self.patch(published_devices, "any_published", lambda: True)
        self.patch(published_devices, "read", read)
        good, bad, again = await self.found.find(["/good", "/bad", "/good"])
        self.assertEqual((good, again), (volume, volume))
        self.assertIsInstance(bad, FailedPrecondition)
        with self.assertRaises(ZeroDivisionError):
            await self.found.find(["/good", "/bug"])

    async def test_block_devices_are_found_without_links(self) -> None:
        (self.top / "disk").write_bytes(bytes(1 << 20))
        command = ["losetup", "--find", "--show", str(self.top / "disk")]
        device = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
        self.addCleanup(subprocess.run, ["losetup", "--detach", device], check=True)
        (self.top / "link").symlink_to(device)
        paths = [device, str(self.top / "link"), "/dev/null", str(self.top), str(self.top / "missing")]
        self.assertEqual(await self.found.find_block_devices(paths), [device, device, "", "", ""])
        try:
            await self.found.find_block_devices([f"/dev/{'x' * 300}"])
        except FailedPrecondition as error:
            self.assertIn("can't be looked at", str(error))
        else:
            self.fail("it was looked at")
