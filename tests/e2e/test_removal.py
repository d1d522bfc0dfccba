# SPDX-License-Identifier: Apache-2.0
"""Removing the packages from a node with pods: QEMU's VMs end, and persistent volumes stay."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from twisted.internet.defer import Deferred

from tests.e2e import cleanroot
from tests.e2e.booted import Booted
from tests.e2e.qemu_case import IMAGES
from tests.e2e.test_units import UnitCase
from tests.e2e.uplink import Uplink
from tests.harness.durations import slow

NODE_PACKAGES = ("infranetes", "infranetes-common")
DEVICES = ("net/tun", "kvm")
VOLUME = "var/lib/infranetes/qemu/volumes/kept.raw"


@slow(120, "packages are installed and removed in a booted root")
class RemovalTests(UnitCase):
    """A booted node with the guest image of this machine, and QEMU."""

    timeout = 900
    start_seconds = 300.0  # with the template's boot, without KVM

    def setUp(self) -> None:
        needed = {*cleanroot.depends(*NODE_PACKAGES), *cleanroot.depends("infranetes", field="Recommends")}
        self.root = cleanroot.CleanRoot(cleanroot.base(sorted({*needed, "systemd"}), purpose="qemu"))
        self.addCleanup(self.root.remove)
        shutil.copytree(IMAGES, self.root.path / "var/lib/infranetes/guest", symlinks=True)
        done = self.root.install(*NODE_PACKAGES)
        self.assertEqual(done.returncode, 0, done.stdout)
        (self.root.path / "etc/infranetes/infranetes.toml").write_text('provider = "qemu"\n')
        uplink = Uplink()
        self.addCleanup(uplink.end)
        present = [each for each in DEVICES if Path("/dev", each).exists()]
        self.system = Booted(self.root, uplink.path, present, seconds=self.start_seconds)
        self.addCleanup(self.system.end)

    def qemus(self) -> list[str]:
        """Return the names of all QEMU processes of the node."""
        names = self.system.run("sh", "-c", "cat /proc/[0-9]*/comm").stdout.split()
        return [name for name in names if name.startswith("qemu-system")]

    def links(self) -> set[str]:
        """Return the names of the node's network interfaces."""
        return {link["ifname"] for link in json.loads(self.system.run("ip", "-j", "link").stdout)}

    def test_vms_and_their_network_end_and_persistent_volumes_stay(self) -> Deferred[None]:
        async def scenario() -> None:
            await self.run_sandbox()
            self.assertTrue(self.qemus())
            self.assertIn("infranetes0", self.links())
            kept = self.system.path(VOLUME)
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text("data")
            purged = self.system.run("dpkg", "--purge", *NODE_PACKAGES)
            self.assertEqual(purged.returncode, 0, purged.stdout)
            self.assertEqual(self.qemus(), [])
            self.assertEqual(self.links(), {"lo", "eth0"})
            self.assertEqual(self.system.run("nft", "list", "tables").stdout, "")
            self.assertIn("has persistent volumes", purged.stdout)
            state = self.system.path("var/lib/infranetes")
            left = [str(path.relative_to(state)) for path in state.rglob("*") if path.is_file()]
            self.assertEqual(left, ["qemu/volumes/kept.raw"])
            self.assertFalse(self.system.path("run/infranetes").exists())
            for package in ("infranetes", "infranetes_common"):
                self.assertFalse(self.system.path(f"usr/lib/python3/dist-packages/{package}").exists())

        return Deferred.fromCoroutine(scenario())
