# SPDX-License-Identifier: Apache-2.0
"""Tracing of the packaged daemon, with OpenTelemetry's library installed as docs/tracing.md says."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from twisted.internet import reactor
from twisted.internet.endpoints import UNIXClientEndpoint
from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThread
from twisted.trial import unittest

from infranetes_common.concurrency import start
from infranetes_common.wire import cri
from tests.e2e import cleanroot, suites
from tests.e2e.cleanroot import TREE
from tests.e2e.test_package import DAEMON, PACKAGES, SOCKET, START_SECONDS
from tests.harness.durations import slow
from tests.support.collector import MISSING, Collector
from txgrpc import Channel, GrpcError

PAGE = TREE / "docs" / "tracing.md"
REQUIREMENTS = TREE / "docs" / "tracing-requirements.txt"
WHEELS = TREE / "build" / "wheels"
CALL = "runtime.v1.RuntimeService/Version"


def told() -> tuple[list[str], str, str]:
    """The packages of Debian that the page names, what pip is told, and the variable of the drop-in."""
    text = PAGE.read_text().replace("\\\n", "")
    (packages,) = re.findall(r"^    apt install (.+)$", text, flags=re.M)
    (command,) = re.findall(r"^    (python3 -m pip install .+)$", text, flags=re.M)
    (variable,) = re.findall(r"^    Environment=(\S+)$", text, flags=re.M)
    return packages.split(), command, variable


@functools.cache
def wheels() -> Path:
    """A directory with what pip is to install, downloaded once: a clean root has no network."""
    digest = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()[:16]
    directory = WHEELS / f"tracing-{digest}"
    if not directory.exists():
        WHEELS.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=WHEELS) as scratch:
            pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
            options = ["--no-deps", "--require-hashes", "--dest", scratch, "--requirement", str(REQUIREMENTS)]
            subprocess.run([*pip, *options], check=True)
            os.chmod(scratch, 0o755)  # noqa: S103 - as any directory of the tree
            shutil.copytree(scratch, directory)
    return directory


@slow(60, "packages are installed in a clean root")
class InstalledTests(unittest.TestCase):
    """The library beside the packages, in a Debian that has what the page has apt install."""

    timeout = 900
    if MISSING:
        skip = MISSING

    def setUp(self) -> None:
        packages, self.install, self.variable = told()
        self.root = cleanroot.CleanRoot(self.base(packages))
        self.addCleanup(self.root.remove)
        self.collector = Collector(reactor)
        self.addCleanup(lambda: start(self.collector.stop()))
        tracing = f'endpoint = "{self.collector.endpoint}"\nsampling_ratio = 1.0\n'
        (self.root.path / "etc/infranetes").mkdir()
        (self.root.path / "etc/infranetes/infranetes.toml").write_text(
            f'provider = "simulated"\n[tracing]\n{tracing}'
        )
        shutil.copytree(wheels(), self.root.path / "tmp/wheels")

    def base(self, packages: list[str]) -> Path:
        """Return the tar of a root with our packages' dependencies and these."""
        needed = sorted({*cleanroot.depends(*PACKAGES), *packages})
        return cleanroot.base(needed, purpose="tracing")

    def installed(self, *command: str) -> None:
        done = self.root.run(*command)
        self.assertEqual(done.returncode, 0, done.stdout)

    def make(self) -> str:
        """Install all but the library, try to start without it, and install it. Return what was said."""
        for package in PACKAGES:
            shutil.copy(cleanroot.built(package), self.root.path / "tmp")
        names = (f"/tmp/{cleanroot.built(package).name}" for package in PACKAGES)
        self.installed("dpkg", "--install", "--force-confold", *names)
        refused = self.root.run(*DAEMON, timeout=60)
        self.assertNotEqual(refused.returncode, 0)
        offline = ("env", "PIP_NO_INDEX=1", "PIP_FIND_LINKS=/tmp/wheels")
        self.installed(*offline, "sh", "-c", self.install)
        return refused.stdout

    async def call(self) -> None:
        """Make a call of the CRI, repeated until the daemon answers."""
        until = reactor.seconds() + START_SECONDS
        while True:
            channel = Channel(reactor, UNIXClientEndpoint(reactor, str(self.root.path / SOCKET)))
            try:
                await channel.stub(cri.RuntimeService).Version(cri.VersionRequest(), timeout=5.0)
                return
            except GrpcError as error:
                self.assertLess(reactor.seconds(), until, f"{error}; the daemon said: {self.root.output()}")
            finally:
                await channel.close()
            await deferLater(reactor, 0.2)

    async def test_spans_are_sent_once_the_library_is_installed_as_the_page_says(self) -> None:
        self.assertIn("docs/tracing.md", await deferToThread(self.make))
        daemon = self.root.start("env", self.variable, *DAEMON)
        try:
            await self.call()
            until = reactor.seconds() + START_SECONDS
            while not self.collector.named(CALL):
                self.assertLess(reactor.seconds(), until, self.root.output())
                await deferLater(reactor, 0.2)
        finally:
            code = await deferToThread(self.root.end, daemon)
        self.assertEqual(code, 0, self.root.output())


class Debian13Tests(InstalledTests):
    """The same on Debian 13."""

    def base(self, packages: list[str]) -> Path:
        self.assertEqual(sorted(packages), sorted(suites.TRACING))
        return suites.base("trixie")  # which `make test-suite` has made
