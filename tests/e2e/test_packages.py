# SPDX-License-Identifier: Apache-2.0
"""The Debian packages and their apt repository: content, installation, first run and removal, and tracing.

From the repository `apt install infranetes` runs on each release of Debian. OpenTelemetry's library is
installed as docs/tracing.md says.
"""

from __future__ import annotations

import os
import posixpath
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path, PurePosixPath
from typing import Any

from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import UNIXClientEndpoint
from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThread
from twisted.trial import unittest

from infranetes_common.concurrency import start
from infranetes_common.wire import cri
from infranetes_common.wire.cri_rpcs import RuntimeStub
from tests.e2e import cleanroot, roots, suites
from tests.e2e.booted import Booted
from tests.e2e.cleanroot import TREE
from tests.e2e.roots import PACKAGES
from tests.harness.durations import slow
from tests.support.collector import MISSING, Collector
from txgrpc import Channel, GrpcError

MODULES = "usr/lib/python3/dist-packages/"
DAEMON = ("twistd3", "--nodaemon", "--pidfile=", "infranetes", "--config", "/etc/infranetes/infranetes.toml")
SOCKET = "run/infranetes/infranetes.sock"
START_SECONDS = 30.0


def contents(package: str) -> list[str]:
    """Return the files in one of our packages, without the leading slash."""
    listed = subprocess.run(
        ["dpkg-deb", "--contents", cleanroot.built(package)], check=True, capture_output=True, text=True
    ).stdout
    paths = (line.split(maxsplit=5)[5].removeprefix("./") for line in listed.splitlines())
    return [path for path in paths if path and not path.endswith("/")]


@slow(8, "the packages are built first")
class ContentTests(unittest.SynchronousTestCase):
    """The content of the packages."""

    def test_lintian_reports_nothing(self) -> None:
        debs = [str(cleanroot.built(package)) for package in PACKAGES]
        checked = subprocess.run(
            ["lintian", "--allow-root", "--pedantic", "--fail-on", "error,warning,info,pedantic", *debs],
            check=False,
            capture_output=True,
            text=True,
        )
        self.assertEqual(checked.returncode, 0, checked.stdout + checked.stderr)

    def test_each_module_is_in_one_package(self) -> None:
        tops = {
            package: {
                path.removeprefix(MODULES).split("/")[0] for path in contents(package) if MODULES in path
            }
            for package, found in ((package, contents(package)) for package in PACKAGES)
        }
        self.assertEqual(tops["infranetes"], {"infranetes", "twisted"})
        self.assertEqual(tops["vmserver"], {"vmserver", "twisted"})
        self.assertEqual(tops["infranetes-simulation"], {"infranetes_simulation"})
        self.assertEqual(
            {top for top in tops["infranetes-common"] if not top.endswith(".egg-info")},
            {"txgrpc", "infranetes_common"},
        )

    def test_each_daemon_brings_its_own_plug_in_alone(self) -> None:
        for package in ("infranetes", "vmserver"):
            plugins = [path for path in contents(package) if "twisted/plugins" in path]
            self.assertEqual(plugins, [f"{MODULES}twisted/plugins/{package}_plugin.py"])

    def test_no_file_is_in_two_packages(self) -> None:
        found = [path for package in PACKAGES for path in contents(package)]
        self.assertEqual(len(found), len(set(found)))

    def test_every_module_of_the_tree_is_packaged(self) -> None:
        packaged = {path for package in PACKAGES for path in contents(package)}
        for top in ("infranetes", "infranetes_common", "infranetes_simulation", "txgrpc", "vmserver"):
            for module in (cleanroot.TREE / top).rglob("*.py"):
                self.assertIn(MODULES + str(module.relative_to(cleanroot.TREE)), packaged)
        self.assertIn(f"{MODULES}infranetes_common/wire/descriptors.binpb", packaged)

    def test_every_link_of_the_pages_and_every_path_to_them_leads_to_a_file(self) -> None:
        top = "usr/share/doc/infranetes/"
        files = set(contents("infranetes"))
        found = files | {str(parent) for path in files for parent in PurePosixPath(path).parents}
        pages = [
            TREE / "README.md",
            TREE / "CHANGELOG.md",
            TREE / "CONTRIBUTING.md",
            *sorted((TREE / "docs").glob("*.md")),
        ]
        for page in pages:
            where = top + str(page.relative_to(TREE))
            self.assertTrue(where in found, where)
            for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
                # The text of LICENSE is in debian/copyright instead.
                if "://" not in target and target != "LICENSE":
                    there = posixpath.normpath(posixpath.join(posixpath.dirname(where), target))
                    self.assertTrue(there in found, f"{page.name}: {target}")
        for file in ("debian/infranetes.service", "debian/etc/infranetes.toml"):
            named = re.findall(r"/(usr/share/doc/infranetes/[\w/-]+\.md)", (TREE / file).read_text())
            self.assertTrue(named, file)
            self.assertLessEqual(set(named), found)

    def test_kubelet_finds_the_driver_of_flexvolumes(self) -> None:
        where = "usr/libexec/kubernetes/kubelet-plugins/volume/exec/infranetes.io~volume"
        found = contents("infranetes")
        (link,) = [path for path in found if path.startswith(f"{where}/")]
        name, target = link.split(" -> ")
        self.assertEqual(name, f"{where}/volume")
        self.assertEqual(posixpath.normpath(posixpath.join(where, target)), "usr/bin/infranetes-flexvolume")
        self.assertIn("usr/bin/infranetes-flexvolume", found)

    def test_each_says_what_it_depends_on_and_the_nodes_what_is_new(self) -> None:
        for package in PACKAGES:
            self.assertIn(f"usr/share/doc/{package}/sbom.cdx.json", contents(package))
        for file in ("NEWS.Debian.gz", "README.Debian"):
            self.assertIn(f"usr/share/doc/infranetes/{file}", contents("infranetes"))

    def test_the_units_and_the_configuration_are_there(self) -> None:
        for package, unit in (("infranetes",) * 2, ("vmserver",) * 2, ("infranetes", "infranetes-guest")):
            path = f"lib/systemd/system/{unit}.service"  # since Debian 13 below /usr
            self.assertIn(path, [each.removeprefix("usr/") for each in contents(package)])
        for package in ("infranetes", "vmserver"):
            conffiles = subprocess.run(
                ["dpkg-deb", "--info", cleanroot.built(package), "conffiles"],
                check=True,
                capture_output=True,
                text=True,
            ).stdout
            self.assertEqual(conffiles.split(), [f"/etc/infranetes/{package}.toml"])


# Prints the names of the packages that modules of infranetes.publish.aws… lack.
_IMPORT_ALL = """
import importlib, pkgutil
optional = ("infranetes.providers.cloud.", "infranetes.publish.", "infranetes.tracing.exported")
lacking = set()
for name in ("infranetes", "infranetes_common", "infranetes_simulation", "txgrpc", "vmserver"):
    for found in pkgutil.walk_packages(importlib.import_module(name).__path__, name + "."):
        try:
            importlib.import_module(found.name)
        except ModuleNotFoundError as error:
            if not found.name.startswith(optional):
                raise
            lacking.add(error.name)
print(*sorted(lacking), end="")
"""


@slow(60, "packages are installed in a clean root")
class InstallTests(unittest.TestCase):
    """The node's packages in a Debian that has their dependencies and nothing else."""

    timeout = 900

    def setUp(self) -> None:
        self.root = cleanroot.CleanRoot(roots.INSTALLED.tar())
        self.addCleanup(self.root.remove)

    def install(self, *packages: str) -> None:
        done = self.root.install(*packages)
        self.assertEqual(done.returncode, 0, done.stdout)

    def configure(self, text: str) -> None:
        (self.root.path / "etc/infranetes/infranetes.toml").write_text(text)

    async def call(self, method: str, request: Any) -> Any:
        """Make a CRI call to the daemon, repeated until its socket is there."""
        path = str(self.root.path / SOCKET)
        until = time.monotonic() + START_SECONDS
        while True:
            channel = Channel(reactor, UNIXClientEndpoint(reactor, path))
            try:
                return await getattr(RuntimeStub(channel), method)(request, timeout=5.0)
            except GrpcError as error:
                if time.monotonic() > until:
                    raise AssertionError(f"{error}; the daemon said: {self.root.output()}") from None
            finally:
                await channel.close()
            await deferLater(reactor, 0.2)

    async def run_daemon(self) -> None:
        """Start the daemon with simulated VMs, ask it for its version, and end it."""
        self.configure('provider = "simulated"\n')
        daemon = self.root.start(*DAEMON)
        try:
            version = await self.call("Version", cri.VersionRequest(version="v1"))
            self.assertEqual(version.runtime_name, "infranetes")
            self.assertEqual(version.runtime_api_version, "v1")
            until = time.monotonic() + START_SECONDS
            ready = False
            while not ready:
                status = await self.call("Status", cri.StatusRequest(verbose=True))
                ready = all(condition.status for condition in status.status.conditions)
                self.assertLess(time.monotonic(), until, f"{status}; {self.root.output()}")
        finally:
            code = self.root.end(daemon)
        self.assertEqual(code, 0, self.root.output())

    def test_the_daemon_runs_with_the_packages_it_depends_on(self) -> Deferred[None]:
        async def scenario() -> None:
            self.install(*PACKAGES)  # all of them, as the simulated machines come with the agent's package
            await self.run_daemon()

        return Deferred.fromCoroutine(scenario())

    def test_every_module_imports_with_the_packages_it_depends_on(self) -> None:
        """Except those for clouds and the one that sends traces, which name what else they need."""
        self.install(*PACKAGES)
        # Debian 12's Twisted and cryptography warn of each other.
        done = self.root.run("/usr/bin/python3", "-W", "ignore", "-c", _IMPORT_ALL)
        self.assertEqual(
            (done.returncode, done.stdout), (0, "botocore libcloud opentelemetry pyVim pyVmomi"), done.stdout
        )
        self.configure('provider = "aws"\n[providers.aws]\nregion = "eu-west-1"\n')
        told = self.root.run("/usr/bin/infranetes-guest", "publish", "aws", "--disk", "/dev/null")
        self.assertNotEqual(told.returncode, 0)
        self.assertIn("python3-botocore", told.stdout)

    def test_a_wrong_key_in_the_configuration_ends_the_start_and_is_named(self) -> None:
        self.install("infranetes", "infranetes-common")
        self.configure("no_such_key = 1\n")
        done = self.root.run(*DAEMON, timeout=60)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("no_such_key", done.stdout)
        self.assertIn("/etc/infranetes/infranetes.toml", done.stdout)
        self.assertNotIn("Traceback", done.stdout)

    def test_twistd_finds_the_plug_ins_as_soon_as_they_are_installed(self) -> None:
        self.install(*PACKAGES)
        done = self.root.run("twistd3", "--help")
        self.assertRegex(done.stdout, r"\n\s+infranetes\s")
        self.assertRegex(done.stdout, r"\n\s+vmserver\s")

    def test_purging_leaves_nothing(self) -> Deferred[None]:
        async def scenario() -> None:
            before = self.root.files()
            self.install(*PACKAGES)
            await self.run_daemon()
            removed = self.root.run("dpkg", "--remove", *PACKAGES)
            self.assertEqual(removed.returncode, 0, removed.stdout)
            self.assertTrue((self.root.path / "etc/infranetes/infranetes.toml").exists())
            purged = self.root.run("dpkg", "--purge", *PACKAGES)
            self.assertEqual(purged.returncode, 0, purged.stdout)
            self.assertEqual(sorted(self.root.files() - before), [])
            self.assertEqual(sorted(before - self.root.files()), [])
            known = self.root.run("dpkg-query", "--show", *PACKAGES)
            self.assertNotEqual(known.returncode, 0, known.stdout)
            self.assertFalse((self.root.path / "run/infranetes").exists())

        return Deferred.fromCoroutine(scenario())


KEYRING = "/etc/apt/keyrings/infranetes.gpg"


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
        root = cleanroot.CleanRoot(roots.REPOSITORY[release].tar())
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


PAGE = TREE / "docs" / "tracing.md"
CALL = "runtime.v1.RuntimeService/Version"


def told() -> tuple[list[str], str, str]:
    """The packages of Debian that the page names, what pip is told, and the variable of the drop-in."""
    text = PAGE.read_text().replace("\\\n", "")
    (packages,) = re.findall(r"^    apt install (.+)$", text, flags=re.M)
    (command,) = re.findall(r"^    (python3 -m pip install .+)$", text, flags=re.M)
    (variable,) = re.findall(r"^    Environment=(\S+)$", text, flags=re.M)
    return packages.split(), command, variable


@slow(60, "packages are installed in a clean root")
class InstalledTests(unittest.TestCase):
    """The library beside the packages, in a Debian that has what the page has apt install."""

    timeout = 900
    release = "bookworm"
    if MISSING:
        skip = MISSING

    def setUp(self) -> None:
        packages, self.install, self.variable = told()
        self.assertEqual(sorted(packages), sorted(suites.TRACING))
        self.root = cleanroot.CleanRoot(roots.TRACING[self.release].tar())
        self.addCleanup(self.root.remove)
        self.collector = Collector(reactor)
        self.addCleanup(lambda: start(self.collector.stop()))
        tracing = f'endpoint = "{self.collector.endpoint}"\nsampling_ratio = 1.0\n'
        (self.root.path / "etc/infranetes").mkdir()
        (self.root.path / "etc/infranetes/infranetes.toml").write_text(
            f'provider = "simulated"\n[tracing]\n{tracing}'
        )
        shutil.copytree(roots.wheels(), self.root.path / "tmp/wheels")

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
                await RuntimeStub(channel).Version(cri.VersionRequest(), timeout=5.0)
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

    release = "trixie"
