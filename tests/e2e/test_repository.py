# SPDX-License-Identifier: Apache-2.0
"""The apt repository: `apt install infranetes` from it, on each release of Debian, and the first start."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from twisted.trial import unittest

from tests.e2e import cleanroot, suites
from tests.e2e.booted import Booted
from tests.e2e.cleanroot import TREE
from tests.e2e.test_package import PACKAGES, START_SECONDS
from tests.harness.durations import slow

KEYRING = "/etc/apt/keyrings/infranetes.gpg"
#: What the packages' own tests of pods need besides the packages; see debian/tests/control.
POD_NEEDS = ("busybox-static", "docker-registry")


class RepositoryCase(unittest.SynchronousTestCase):
    """A test case that makes repositories in the `/repo` of roots."""

    def make_repository(self, root: cleanroot.CleanRoot) -> None:
        """Make the repository, signed by a key of its own, and make the root's apt trust that key."""
        cleanroot.debs()  # makes the packages
        keys = Path(tempfile.mkdtemp(prefix="gpg-"))  # short: gpg-agent has a socket there
        self.addCleanup(shutil.rmtree, keys, ignore_errors=True)
        end_agent = ["gpgconf", "--homedir", str(keys), "--kill", "all"]
        self.addCleanup(lambda: subprocess.run(end_agent, check=False))
        made = subprocess.run(
            [TREE / "debian/make-repo", root.path / "repo"],
            env={**os.environ, "INFRANETES_REPO_KEY": str(keys)},
            check=False,
            capture_output=True,
            text=True,
        )
        self.assertEqual(made.returncode, 0, made.stderr)
        (root.path / KEYRING[1:]).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root.path / "repo/infranetes.gpg", root.path / KEYRING[1:])


@slow(40, "apt installs from a repository in clean roots")
class RepositoryTests(RepositoryCase):
    """Installations in a Debian that already has the packages' dependencies."""

    timeout = 900

    def root(self, release: str) -> cleanroot.CleanRoot:
        """Return a root of that release whose apt knows only the repository."""
        if release == cleanroot.RELEASE:
            tar = cleanroot.base([*cleanroot.depends(*PACKAGES), *POD_NEEDS], purpose="repository")
        else:
            tar = suites.base(release, "repository", POD_NEEDS)
        root = cleanroot.CleanRoot(tar)
        self.addCleanup(root.remove)
        self.make_repository(root)
        for old in (root.path / "etc/apt").glob("sources.list*"):
            old.unlink() if old.is_file() else shutil.rmtree(old)
        (root.path / "etc/apt/sources.list").write_text(
            f"deb [signed-by={KEYRING}] file:/repo {release} main\n"
        )
        return root

    def check_first_start(self, release: str) -> None:
        root = self.root(release)
        install = ("install", "--yes", "--no-install-recommends", "infranetes", "infranetes-simulation")
        for command in (("update",), install):
            done = root.run("apt-get", *command)
            self.assertEqual(done.returncode, 0, done.stdout)
        system = Booted(root)
        self.addCleanup(system.end)

        def status() -> str:
            return system.systemctl("show", "--property=StatusText", "--value", "infranetes")

        # The agent's packages are downloaded; the tools that build an image from them were left out here.
        until = time.monotonic() + 2 * START_SECONDS
        while "mmdebstrap" not in status():
            if time.monotonic() > until:
                units = ("--unit=infranetes", "--unit=infranetes-guest")
                said = system.run("journalctl", "--no-pager", "--output=cat", *units).stdout
                self.fail(f"{status()}; the journal: {said}")
            time.sleep(0.2)
        self.assertIn("waiting for provider qemu: there is no guest image", status())
        self.assertIn("apt-get install", status())
        self.assertEqual(system.systemctl("is-active", "infranetes"), "active")
        self.assertEqual(system.systemctl("show", "--property=NRestarts", "--value", "infranetes"), "0")
        # Run the package's own test, as autopkgtest does.
        shutil.copytree(TREE / "debian/tests", system.path("opt/tests"))
        ran = system.run("/opt/tests/pod-simulated", timeout=180)
        self.assertEqual(ran.returncode, 0, ran.stdout)
        self.assertIn("is ready at", ran.stdout)
        self.assertIn("has written its words and ended", ran.stdout)

    def test_debian_12_has_a_service_that_waits_for_an_image_and_says_so(self) -> None:
        self.check_first_start("bookworm")

    def test_debian_13_has_a_service_that_waits_for_an_image_and_says_so(self) -> None:
        self.check_first_start("trixie")

    def test_what_another_key_has_signed_is_refused(self) -> None:
        root = self.root("bookworm")
        trusted = (root.path / KEYRING[1:]).read_bytes()
        self.make_repository(root)  # anew, with another key
        (root.path / KEYRING[1:]).write_bytes(trusted)
        done = root.run("apt-get", "update", "-o", "APT::Update::Error-Mode=any")
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("not signed", done.stdout)
