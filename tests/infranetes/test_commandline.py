# SPDX-License-Identifier: Apache-2.0
"""The programs' versions, and their errors about a wrong command line."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from infranetes.cri.status import runtime_version
from infranetes_common import __version__
from tests.support import warm

ROOT = Path(__file__).resolve().parents[2]
DAEMONS = ("infranetes", "vmserver")
PROGRAMS = {
    "infranetes-ctl": ["-m", "infranetes.ctl.cli"],
    "infranetes-flexvolume": ["-m", "infranetes.flexvolume.cli"],
    "infranetes-guest": ["-m", "infranetes.publish.command"],
}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(warm.command(*arguments), cwd=ROOT, capture_output=True, text=True, timeout=60)


class VersionTests(SynchronousTestCase):
    """One version, from one place."""

    def test_every_program_tells_it(self) -> None:
        for name in DAEMONS:
            done = run(*warm.TWISTD, name, "--version")
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertRegex(done.stdout, rf"^{name} {re.escape(__version__)} \(Twisted [0-9.]+\)\n$")
        for name, command in PROGRAMS.items():
            done = run(*command, "--version")
            self.assertEqual((done.returncode, done.stdout), (0, f"{name} {__version__}\n"), done.stderr)

    def test_what_is_built_has_it(self) -> None:
        packaged = __version__.replace(".dev", "~dev")  # which dpkg has before the release
        self.assertTrue((ROOT / "debian/changelog").read_text().startswith(f"infranetes ({packaged}) "))
        command = [sys.executable, "setup.py", "--version"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        self.assertEqual(done.stdout.strip().splitlines()[-1:], [__version__], done.stderr)
        self.assertNotIn(f'"{__version__}"', (ROOT / "setup.py").read_text())

    def test_kubelet_is_told_it(self) -> None:
        self.assertEqual(runtime_version(), __version__)


class MistakeTests(SynchronousTestCase):
    """A wrong command line: one line says why, and how to get help."""

    def test_the_daemons(self) -> None:
        for name in DAEMONS:
            for arguments, words in (
                (("--bogus",), "option --bogus not recognized"),
                (("--config",), "option --config requires argument"),
                (("surplus",), "Wrong number of arguments"),
            ):
                done = run(*warm.TWISTD, name, *arguments)
                self.assertEqual((done.returncode, done.stdout), (1, ""), done.stderr)
                self.assertEqual(
                    done.stderr, f"{name}: {words.rstrip('.')}; twistd {name} --help shows what there is\n"
                )

    def test_help_is_as_long_as_it_was(self) -> None:
        for name in DAEMONS:
            done = run(*warm.TWISTD, name, "--help")
            self.assertEqual(done.returncode, 0)
            self.assertTrue(done.stdout.startswith(f"Usage: twistd [options of twistd] {name} [options]\n"))
            self.assertIn("--config=", done.stdout)
            self.assertIn("Display the version", done.stdout)
