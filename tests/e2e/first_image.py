# SPDX-License-Identifier: Apache-2.0
"""A node of each release of Debian, from its installation to a pod in a VM, including the whole build of the
first guest image by its unit; and the packages' own tests, run by autopkgtest as in Debian.

This takes an hour, and the runner ignores a module of this name: ``make test-first-image`` runs it.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from infranetes.guest import sources
from tests.e2e import cleanroot
from tests.e2e.booted import Booted
from tests.e2e.cleanroot import TREE
from tests.e2e.roots import PACKAGES, POD_NEEDS
from tests.e2e.test_packages import KEYRING, RepositoryCase
from tests.e2e.uplink import Uplink

RELEASE = cleanroot.RELEASE
POD_SECONDS = 2400.0  # for the image, the template and the pod, without KVM
DEVICES = ("net/tun", "kvm")


def autopkgtest(test: str, *flags: str) -> Sequence[str]:
    """Return the command that runs one of the packages' tests with the packages that are installed."""
    return ("autopkgtest", f"--test-name={test}", "--no-built-binaries", *flags, "/opt/tree", "--", "null")


class FirstImageTests(RepositoryCase):
    """A node with the recommended packages, from the repository and Debian's archive."""

    timeout = 3600

    def root(self, release: str) -> cleanroot.CleanRoot:
        """Return a root of that release whose apt knows the repository, and Debian's archive as here."""
        needed = {*cleanroot.depends("infranetes", "infranetes-common")}
        recommended = {*cleanroot.depends("infranetes", field="Recommends")}
        packages = sorted({*needed, *recommended, *POD_NEEDS, "systemd", "autopkgtest", "dpkg-dev"})
        root = cleanroot.CleanRoot(cleanroot.base(packages, release, "recommended"))
        self.addCleanup(root.remove)
        self.make_repository(root)
        archives = sources.of_release(release)
        self.write(root, "etc/apt/apt.conf.d/99archive", archives.settings)
        own = f"deb [signed-by={KEYRING}] file:/repo {release} main"
        self.write(root, "etc/apt/sources.list", (own, *archives.lines))
        shutil.copy("/etc/resolv.conf", root.path / "etc/resolv.conf")
        return root

    def write(self, root: cleanroot.CleanRoot, path: str, lines: Sequence[str]) -> None:
        (root.path / path).write_text("".join(f"{line}\n" for line in lines))

    def check_first_pod(self, release: str) -> None:
        root = self.root(release)
        for command in (("update",), ("install", "--yes", "infranetes")):
            done = root.run("apt-get", *command, timeout=300)
            self.assertEqual(done.returncode, 0, done.stdout)
        uplink = Uplink()
        self.addCleanup(uplink.end)
        devices = [each for each in DEVICES if Path("/dev", each).exists()]
        system = Booted(root, uplink.path, devices)
        self.addCleanup(system.end)
        shutil.copytree(TREE / "debian", system.path("opt/tree/debian"))
        # It is a machine of its own as far as the test needs one, which autopkgtest can't know.
        ran = system.run(
            *autopkgtest("pod-qemu", "--ignore-restrictions=isolation-machine"), timeout=POD_SECONDS
        )
        units = ("--unit=infranetes", "--unit=infranetes-guest")
        said = system.run("journalctl", "--no-pager", "--output=cat", *units).stdout
        self.assertEqual(ran.returncode, 0, f"{ran.stdout[-3000:]}; the journal: {said[-6000:]}")
        self.assertIn("is ready at", ran.stdout)
        self.assertIn("has written its words and ended", ran.stdout)
        self.assertRegex(ran.stdout, r"(?m)^pod-qemu +PASS$")
        self.assertEqual(
            system.systemctl("show", "--property=Result", "--value", "infranetes-guest"), "success", said
        )
        self.assertTrue(system.path("var/lib/infranetes/guest/current").exists())
        self.assertEqual(system.systemctl("show", "--property=NRestarts", "--value", "infranetes"), "0")

    def test_a_pod_runs_in_a_vm_though_nobody_has_built_an_image_on_debian_12(self) -> None:
        self.check_first_pod("bookworm")

    def test_a_pod_runs_in_a_vm_though_nobody_has_built_an_image_on_debian_13(self) -> None:
        self.check_first_pod("trixie")


class AutopkgtestTests(RepositoryCase):
    """The packages' test, in a booted Debian with autopkgtest and the packages' dependencies."""

    timeout = 1800

    def test_autopkgtest_runs_the_packages_own_test_of_a_simulated_pod(self) -> None:
        root = cleanroot.CleanRoot(
            cleanroot.base(
                ["autopkgtest", "dpkg-dev", *POD_NEEDS, *cleanroot.depends(*PACKAGES)], RELEASE, "tested"
            )
        )
        self.addCleanup(root.remove)
        self.make_repository(root)
        (root.path / "etc/apt/sources.list").write_text(
            f"deb [signed-by={KEYRING}] file:/repo {RELEASE} main\n"
        )
        system = Booted(root)
        self.addCleanup(system.end)
        updated = system.run("apt-get", "update")
        self.assertEqual(updated.returncode, 0, updated.stdout)
        shutil.copytree(TREE / "debian", system.path("opt/tree/debian"))
        ran = system.run(*autopkgtest("pod-simulated"), timeout=900)
        self.assertEqual(ran.returncode, 0, ran.stdout[-6000:])
        self.assertRegex(ran.stdout, r"(?m)^pod-simulated +PASS$")
