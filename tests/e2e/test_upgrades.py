# SPDX-License-Identifier: Apache-2.0
"""Releases and packages that replace others, or are removed, on nodes whose pods live on or end."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from twisted.internet.defer import Deferred
from twisted.internet.threads import deferToThread

from tests.e2e import cleanroot, roots
from tests.e2e.booted import Booted
from tests.e2e.pod_case import PodCase
from tests.e2e.qemu_case import IMAGES
from tests.e2e.roots import NODE_PACKAGES, PACKAGES
from tests.e2e.test_units import BootedCase
from tests.e2e.uplink import Uplink
from tests.harness.durations import slow
from tests.infranetes.daemon.case import ROOT, images
from tests.infranetes.daemon.upgrade_case import UpgradeCase
from tests.support.disk_space import copy_image
from tests.support.releases import previous_packages, previous_release


@slow(150, "the release before boots a template of its own")
class QemuUpgradeTests(PodCase, UpgradeCase):
    """Daemons of both releases over the same VMs, which the first of them launched from this guest image."""

    timeout = 1500  # each release makes a template

    async def vms(self) -> list[Mapping[str, str]]:
        return [{"tap": line} for line in self.taps().splitlines()]

    async def test_this_release_goes_on_with_the_vms_of_the_one_before(self) -> None:
        await self.lives_on(await deferToThread(previous_release), ROOT)

    async def test_the_release_before_goes_on_with_the_vms_of_this_one(self) -> None:
        await self.lives_on(ROOT, await deferToThread(previous_release))


CONFIGURATION = 'provider = "simulated"\n[log]\nlevel = "debug"\n'


@slow(50, "packages of two releases are built and installed")
class PackageUpgradeTests(UpgradeCase):
    """dpkg installs another release over the one whose daemon runs, and nothing else is done.

    :ivar system: the node, which has the case's directories in their usual places.
    """

    timeout = 900

    def make_root(self) -> Path:
        """Make a directory that has the same path on the node."""
        return Path(tempfile.mkdtemp(prefix="inf-", dir="/var/tmp"))

    async def boot(self, debs: Path) -> None:
        """Boot a node with these packages."""
        made = await images()
        self.image = made.reference
        self.node = cleanroot.CleanRoot(await deferToThread(roots.UPGRADED.tar))
        self.addCleanup(self.node.remove)
        logs = self.node.path / str(self.log_directory)[1:]
        logs.mkdir(parents=True)
        self.log_directory.rmdir()
        self.log_directory.symlink_to(logs)
        shutil.copytree(made.path, self.node.path / "var/lib/infranetes/images")
        (self.node.path / "etc/infranetes").mkdir()
        (self.node.path / "etc/infranetes/infranetes.toml").write_text(CONFIGURATION)
        self.system = await deferToThread(Booted, self.node)
        self.addCleanup(self.system.end)
        (self.root / "run").symlink_to(self.system.path("run/infranetes"))
        await self.install(debs)

    async def install(self, debs: Path) -> None:
        """Install these packages with dpkg, so that the daemon is theirs afterwards."""
        found = sorted(debs.glob("*.deb"))
        self.assertEqual(len(found), len(PACKAGES), found)
        there = self.node.path / "var/tmp/debs"
        shutil.rmtree(there, ignore_errors=True)
        shutil.copytree(debs, there)
        names = [f"/var/tmp/debs/{each.name}" for each in found]
        # As with apt, the administrator's configuration stays.
        command = ("dpkg", "--install", "--force-confold", *names)
        done = await deferToThread(self.system.run, *command, timeout=300)
        self.assertEqual(done.returncode, 0, done.stdout)
        await self.connect()

    @property
    def alive(self) -> bool:
        return self.system.systemctl("is-active", "infranetes") in ("active", "activating")

    @property
    def log(self) -> str:
        """The daemons' journal."""
        journal = ("journalctl", "--no-pager", "--output=cat", "--unit=infranetes")
        return self.system.run(*journal).stdout

    async def check(self, upgrade: bool) -> None:
        ours = await deferToThread(cleanroot.debs)  # this also installs the tools that build packages
        before = await deferToThread(previous_packages)
        first, then = (before, ours) if upgrade else (ours, before)
        await self.boot(first)

        async def replace() -> None:
            await self.install(then)

        await self.check_pods_live_on(replace)
        self.assertEqual(self.system.systemctl("show", "--property=NRestarts", "--value", "infranetes"), "0")
        audit = self.system.run("dpkg", "--audit")
        self.assertEqual((audit.returncode, audit.stdout), (0, ""))

    async def test_an_upgrade_from_the_release_before(self) -> None:
        await self.check(upgrade=True)

    async def test_a_way_back_to_the_release_before(self) -> None:
        await self.check(upgrade=False)


DEVICES = ("net/tun", "kvm")
VOLUME = "var/lib/infranetes/qemu/volumes/kept.raw"


@slow(120, "packages are installed and removed in a booted root")
class RemovalTests(BootedCase):
    """A booted node with the guest image of this machine, and QEMU."""

    timeout = 900
    start_seconds = 300.0  # with the template's boot, without KVM

    def setUp(self) -> None:
        self.root = cleanroot.CleanRoot(roots.NODE.tar())
        self.addCleanup(self.root.remove)
        copy_image(IMAGES, self.root.path / "var/lib/infranetes/guest")
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
