# SPDX-License-Identifier: Apache-2.0
"""Packages of one release are replaced by those of another, on a booted Debian whose pods live on."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from twisted.internet.threads import deferToThread

from tests.e2e import cleanroot
from tests.e2e.booted import Booted
from tests.e2e.test_package import PACKAGES
from tests.harness.durations import slow
from tests.infranetes.daemon.case import images
from tests.infranetes.daemon.upgrade_case import UpgradeCase
from tests.support.releases import previous_packages

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
        self.node = cleanroot.CleanRoot(await deferToThread(cleanroot.base, cleanroot.depends(*PACKAGES)))
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
