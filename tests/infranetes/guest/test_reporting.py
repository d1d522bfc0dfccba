# SPDX-License-Identifier: Apache-2.0
"""The default packages of a guest image, and what a build reports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from infranetes.guest import image, own_packages, reporting
from infranetes.guest.reporting import Build
from infranetes.providers.interface import Awaited
from infranetes.providers.qemu.start_checks import without_image
from infranetes_common.errors import FailedPrecondition, InfranetesError

ROOT = Path(__file__).resolve().parents[3]
# A build that reports one thing and then waits.
WAITS = """
import sys, time
from pathlib import Path
from infranetes.guest.reporting import reported
with reported(Path(sys.argv[1]), lambda words: print(words, flush=True)) as tell:
    tell("installing Debian")
    time.sleep(1000)
"""


class OwnPackagesTests(SynchronousTestCase):
    """The agent's packages, from this machine's apt."""

    def test_a_version_that_apt_does_not_know_is_named_with_what_to_do(self) -> None:
        self.patch(own_packages, "_installed_version", lambda: "0.0.0~none")
        with self.assertRaises(InfranetesError) as caught, own_packages.downloaded(lambda words: None):
            self.fail("there is no such version")
        self.assertIn("vmserver=0.0.0~none", str(caught.exception))
        self.assertIn("--debs", str(caught.exception))

    def test_without_an_installed_package_no_version_is_right(self) -> None:
        self.patch(own_packages, "_INSTALLED", "no-package-of-this-name")
        with self.assertRaises(FailedPrecondition) as caught, own_packages.downloaded(lambda words: None):
            self.fail("nothing says which version")
        self.assertIn("--debs", str(caught.exception))


class ReportTests(SynchronousTestCase):
    """What a build reports to the daemon."""

    def setUp(self) -> None:
        self.directory = Path(self.mktemp()).absolute()

    def why(self) -> Exception:
        return without_image(self.directory, image.NoGuestImage("there is no guest image"))

    def test_before_the_first_build(self) -> None:
        self.assertIsNone(reporting.read(self.directory))
        self.assertEqual(str(self.why()), "there is no guest image")

    def test_a_build_under_way_and_one_that_was_killed(self) -> None:
        command = [sys.executable, "-c", WAITS, str(self.directory)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                self.assertEqual(process.stdout.readline(), "installing Debian\n")
                while (found := reporting.read(self.directory)) != Build(True, "installing Debian"):
                    self.assertIsNone(process.poll(), found)
                self.assertIsInstance(self.why(), Awaited)
                self.assertIn("being built: installing Debian", str(self.why()))
                with reporting.reported(self.directory, lambda words: None) as tell:
                    tell("another build, which waits for that one")
                self.assertEqual(reporting.read(self.directory), found)
            finally:
                process.kill()
        self.assertEqual(reporting.read(self.directory), Build(False, "installing Debian"))
        self.assertNotIsInstance(self.why(), Awaited)
        self.assertIn("not completed: installing Debian", str(self.why()))

    def test_one_that_fails_says_why_in_a_line(self) -> None:
        error = InfranetesError("apt failed:\n\nmany\nlines\nno network\n" + "\n")
        with self.assertRaises(InfranetesError), reporting.reported(self.directory, lambda words: None):
            raise error
        self.assertEqual(reporting.read(self.directory), Build(False, "apt failed: … no network"))

    def test_one_that_succeeds_leaves_nothing_to_say(self) -> None:
        said: list[str] = []
        with reporting.reported(self.directory, said.append) as tell:
            tell("making a disk")
        self.assertEqual(said, ["making a disk"])
        self.assertIsNone(reporting.read(self.directory))
