# SPDX-License-Identifier: Apache-2.0
"""What `make wheel` builds: what is in it, and that it runs where nothing else is installed."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from importlib.metadata import Distribution, PathDistribution
from pathlib import Path
from zipfile import Path as InZip
from zipfile import ZipFile

from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import UNIXClientEndpoint
from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import SynchronousTestCase, TestCase

import delivery.wheels
from infranetes_common import __version__
from infranetes_common.wire import cri
from infranetes_common.wire.cri_rpcs import RuntimeStub
from tests.delivery.environments import TREE, Environment, clean, closure, requirements
from tests.harness.durations import slow
from tests.harness.needs import needs_programs
from txgrpc import Channel, GrpcError

_START_SECONDS = 60
_OURS = ("infranetes", "txgrpc")


@functools.cache
def built() -> Path:
    """The directory with both distributions' sdists and wheels, built once for all tests."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=TREE, check=True, capture_output=True, text=True).stdout.split("\0")
    states = [(name, (TREE / name).lstat()) for name in names if name and os.path.lexists(TREE / name)]
    key = hashlib.sha256(repr([(name, each.st_size, each.st_mtime_ns) for name, each in states]).encode())
    kept = TREE / "build" / "delivered"
    kept.mkdir(parents=True, exist_ok=True)
    directory = kept / key.hexdigest()[:16]
    with (kept / "lock").open("w") as lock:  # other workers need the same
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not directory.exists():
            for old in kept.iterdir():
                if old.is_dir():
                    shutil.rmtree(old)
            new = kept / "new"
            command = [sys.executable, "-m", "delivery.wheels", str(new)]
            done = subprocess.run(command, cwd=TREE, check=False, capture_output=True, text=True)
            if done.returncode:
                raise AssertionError(done.stderr)
            new.rename(directory)
    return directory


def wheel(name: str) -> Path:
    (found,) = built().glob(f"{name}-*.whl")
    return found


def sdist(name: str) -> Path:
    (found,) = built().glob(f"{name}-*.tar.gz")
    return found


def metadata(name: str) -> Distribution:
    (directory,) = {each.split("/")[0] for each in ZipFile(wheel(name)).namelist() if ".dist-info/" in each}
    return PathDistribution(InZip(wheel(name), f"{directory}/"))  # type: ignore[arg-type]


@needs_programs("protoc", "git")
@slow(40, "an environment is made that builds, once for all of them")
class ContentTests(SynchronousTestCase):
    """What the files hold."""

    timeout = 900

    def test_a_wheel_has_all_modules_and_the_descriptors_but_no_tests(self) -> None:
        names = set(ZipFile(wheel("infranetes")).namelist())
        for top in ("infranetes", "infranetes_common", "infranetes_simulation", "vmserver"):
            for module in (TREE / top).rglob("*.py"):
                self.assertIn(str(module.relative_to(TREE)), names)
        for data in (
            "infranetes_common/wire/descriptors.binpb",
            "vmserver/containers/oci/seccomp-default.json",
        ):
            self.assertIn(data, names)
        self.assertIn("twisted/plugins/infranetes_plugin.py", names)
        self.assertFalse([name for name in names if name.startswith(("tests", "txgrpc", "bench", "demo"))])
        self.assertNotIn("twisted/plugins/__init__.py", names)

    def test_an_sdist_is_built_without_protoc_and_git(self) -> None:
        """By pip, as whoever installs it would, to the same wheel."""
        python = TREE / "build/wheel-tools/bin/python"
        target = Path(self.mktemp())
        command = [
            str(python),
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-index",
            "--no-deps",
            "--no-build-isolation",
        ]
        with tarfile.open(sdist("infranetes")) as tar:
            when = max(member.mtime for member in tar.getmembers())
        environment = {**clean(), "PATH": str(target / "nothing"), "SOURCE_DATE_EPOCH": str(int(when))}
        done = subprocess.run(
            [*command, "--wheel-dir", target, sdist("infranetes")],
            check=False,
            capture_output=True,
            text=True,
            env=environment,
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        (again,) = target.glob("*.whl")
        self.assertEqual(again.read_bytes(), wheel("infranetes").read_bytes())

    def test_an_sdist_has_one_owner_and_one_time(self) -> None:
        for name in _OURS:
            with tarfile.open(sdist(name)) as tar:
                members = tar.getmembers()
            self.assertEqual(
                {(each.uid, each.gid, each.uname, each.gname) for each in members}, {(0, 0, "", "")}
            )
            self.assertEqual(len({each.mtime for each in members}), 1)
            self.assertEqual(
                [each.name for each in members], sorted(each.name for each in members), "the order"
            )

    def test_who_installs_it_reads_what_it_is(self) -> None:
        for name in _OURS:
            found = metadata(name)
            self.assertEqual(found.version, __version__)
            said = found.metadata
            self.assertEqual(said["License"], "Apache-2.0")
            self.assertEqual(said["Description-Content-Type"], "text/markdown")
            self.assertIn("Framework :: Twisted", said.get_all("Classifier") or ())
            self.assertTrue(said["Summary"] and said["Keywords"])
            description = str(said.get_payload())  # type: ignore[attr-defined]
            self.assertIn(f"# {'Infranetes' if name == 'infranetes' else 'txgrpc'}", description)
            relative = re.findall(r"\]\((?!\w+://|#)([^)]+)\)", description)
            self.assertEqual(relative, [], "links that lead nowhere outside of the repository")

    def test_extras_bring_what_each_cloud_needs_and_the_base_has_none_of_it(self) -> None:
        wanted = requirements(wheel("infranetes"))

        def names(extra: str) -> set[str]:
            return {
                each.name for each in wanted if each.marker is None or each.marker.evaluate({"extra": extra})
            }

        base = names("")
        self.assertIn("txgrpc", base)
        self.assertEqual(base & {"apache-libcloud", "requests", "pyvmomi", "botocore", "grpcio"}, set())
        libcloud = {"apache-libcloud", "requests"}
        for extra in ("gcp", "azure", "openstack", "libcloud"):
            self.assertEqual(names(extra) - base, libcloud, extra)
        self.assertEqual(names("aws") - base, libcloud | {"botocore"})
        self.assertEqual(names("vsphere") - base, libcloud | {"pyvmomi"})
        self.assertIn("opentelemetry-sdk", names("tracing") - base)

    def test_txgrpc_has_the_licence_and_nothing_of_infranetes(self) -> None:
        names = ZipFile(wheel("txgrpc")).namelist()
        self.assertIn("txgrpc/py.typed", names)
        self.assertEqual({name.split("/")[0].split("-")[0] for name in names}, {"txgrpc"})
        self.assertEqual((TREE / "txgrpc/LICENSE").read_text(), (TREE / "LICENSE").read_text())
        project = tomllib.loads((TREE / "txgrpc/pyproject.toml").read_text())["project"]
        self.assertEqual(project["version"], __version__)


@functools.cache
def installed() -> Environment:
    """An environment with both wheels and what they require, made once."""
    environment = Environment(Path(tempfile.mkdtemp(prefix="environment-", dir=os.getcwd())) / "env")
    wanted = [*requirements(wheel("infranetes")), *requirements(wheel("txgrpc"))]
    environment.lend(closure(wanted, ours=_OURS))
    environment.install(wheel("txgrpc"), wheel("infranetes"))
    return environment


class LinkTests(SynchronousTestCase):
    """setup.py, asked with and without the address of the repository."""

    def said(self, field: str, **environment: str) -> str:
        command = [sys.executable, "setup.py", "--quiet", f"--{field}"]
        inherited = {name: value for name, value in os.environ.items() if name != "INFRANETES_URL"}
        return subprocess.run(
            command, cwd=TREE, check=True, capture_output=True, text=True, env={**inherited, **environment}
        ).stdout

    def test_links_lead_to_the_release_in_the_repository_that_is_named(self) -> None:
        url = "https://git.example/infranetes/"
        said = self.said("long-description", INFRANETES_URL=url)
        self.assertIn(f"](https://git.example/infranetes/blob/v{__version__}/docs/install.md)", said)
        self.assertIn(f"](https://git.example/infranetes/raw/v{__version__}/docs/demo.svg)", said)
        self.assertNotIn("](docs/", said)
        self.assertNotIn("docs/", re.sub(r"make \w+", "", self.said("long-description")))


@needs_programs("protoc", "git")
@slow(20, "an environment is made, and a daemon started in it")
class InfranetesTests(TestCase):
    """A fresh environment with the wheels and what they require."""

    timeout = 900

    def setUp(self) -> None:
        # The path is short, because a unix socket's path may have at most 107 bytes.
        self.directory = Path(tempfile.mkdtemp(prefix="wheel-"))
        self.addCleanup(shutil.rmtree, self.directory)
        self.environment = installed()

    def daemon(self, configuration: str) -> subprocess.Popen[str]:
        file = self.directory / "infranetes.toml"
        file.write_text(configuration)
        arguments = ["--nodaemon", "--pidfile=", "infranetes", "--config", str(file)]
        return subprocess.Popen(
            [self.environment.bin / "twistd", *arguments],
            cwd=self.directory,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=clean(),
        )

    def test_twistd_infranetes_serves_the_cri(self) -> Deferred[None]:
        """With machines that are simulated, in processes that the same environment runs."""
        socket = self.directory / "cri.sock"
        process = self.daemon(
            f'provider = "simulated"\nsocket = "{socket}"\nstate_dir = "{self.directory}/state"\n'
            f'run_dir = "{self.directory}/run"\n'
        )
        self.addCleanup(process.kill)

        async def scenario() -> None:
            version = await self.answered(socket, process)
            self.assertEqual((version.runtime_name, version.runtime_version), ("infranetes", __version__))
            process.send_signal(signal.SIGTERM)
            said, _ = await deferToThread(process.communicate, timeout=60)
            self.assertIn(process.returncode, (0, -signal.SIGTERM), said)  # twistd ends by the signal again
            self.assertNotIn("Traceback", said)

        return Deferred.fromCoroutine(scenario())

    async def answered(self, socket: Path, process: subprocess.Popen[str]) -> cri.VersionResponse:
        until = reactor.seconds() + _START_SECONDS  # type: ignore[attr-defined]
        while True:
            channel = Channel(reactor, UNIXClientEndpoint(reactor, str(socket)))  # type: ignore[arg-type]
            try:
                return await RuntimeStub(channel).Version(cri.VersionRequest(), timeout=5.0)
            except GrpcError as error:
                if process.poll() is not None or reactor.seconds() > until:  # type: ignore[attr-defined]
                    process.kill()
                    raise AssertionError(f"{error}: {process.communicate()[0]}") from None
            finally:
                await channel.close()
            await deferLater(reactor, 0.2)  # type: ignore[arg-type]

    def test_a_cloud_without_its_library_says_what_brings_it(self) -> None:
        for cloud in ("gcp", "vsphere"):
            process = self.daemon(f'provider = "{cloud}"\nstate_dir = "{self.directory}/{cloud}"\n')
            said, _ = process.communicate(timeout=60)
            self.assertNotEqual(process.returncode, 0, said)
            self.assertIn(f"pip install 'infranetes[{cloud}]'", said)
            self.assertIn("apt-get install python3-libcloud", said)
            self.assertNotIn("Traceback", said)

    def test_its_programs_run(self) -> None:
        for program in ("infranetes-ctl", "infranetes-guest", "infranetes-flexvolume"):
            self.assertEqual(
                self.environment.run(program, "--help", cwd=self.directory).returncode, 0, program
            )
        listed = self.environment.run("infranetes-ctl", "config", "--all", cwd=self.directory)
        self.assertNotIn("Traceback", listed.stdout)


@needs_programs("protoc", "git")
@slow(60, "all of txgrpc's tests run in a process of their own")
class TxgrpcTests(SynchronousTestCase):
    """A fresh environment with txgrpc and what it requires."""

    timeout = 900

    def setUp(self) -> None:
        self.directory = Path(self.mktemp()).absolute()
        self.directory.mkdir()
        self.environment = Environment(self.directory / "env")
        self.environment.lend(closure(requirements(wheel("txgrpc")), frozenset({"test"})))
        self.environment.install(wheel("txgrpc"))

    def test_its_tests_pass_against_what_is_installed(self) -> None:
        tests = self.directory / "tests"
        shutil.copytree(TREE / "tests/txgrpc", tests / "txgrpc", ignore=shutil.ignore_patterns("__pycache__"))
        (tests / "__init__.py").touch()
        where = self.environment.run(
            "python", "-c", "import txgrpc; print(txgrpc.__file__)", cwd=self.directory
        )
        self.assertIn(str(self.directory / "env"), where.stdout)
        done = self.environment.run(
            "python", "-m", "twisted.trial", "tests.txgrpc", cwd=self.directory, timeout=500
        )
        self.assertEqual(done.returncode, 0, done.stdout[-3000:])
        ran = re.search(r"^Ran (\d+) tests", done.stdout, flags=re.M)
        assert ran is not None, done.stdout
        self.assertGreater(int(ran[1]), 200)

    def test_the_readme_runs_as_it_stands(self) -> None:
        text = (TREE / "txgrpc/README.md").read_text()
        (proto,) = re.findall(r"```proto\n(.*?)```", text, flags=re.S)
        blocks = re.findall(r"```python\n(.*?)```", text, flags=re.S)
        (self.directory / "hello.proto").write_text(proto)
        subprocess.run(
            ["protoc", "--descriptor_set_out=hello.binpb", "hello.proto"], cwd=self.directory, check=True
        )
        # protoc's own modules are tied to a release of protobuf's library, which is another one here.
        (self.directory / "hello_pb2.py").write_text(
            "from pathlib import Path\nfrom google.protobuf import descriptor_pb2, descriptor_pool\n"
            "from txgrpc.service import message_class\n"
            "files = descriptor_pb2.FileDescriptorSet.FromString(Path('hello.binpb').read_bytes())\n"
            "pool = descriptor_pool.DescriptorPool(); pool.Add(files.file[0])\n"
            "DESCRIPTOR = pool.FindFileByName('hello.proto')\n"
            "Greeting = message_class(DESCRIPTOR.message_types_by_name['Greeting'])\n"
        )
        (self.directory / "readme.py").write_text(
            "\n".join(blocks) + "\nfrom twisted.internet.task import react\n"
            "async def main(reactor):\n"
            "    port = await serve(reactor, 's')\n"
            "    print(await greet(reactor, 's'))\n"
            "    await port.stopListening()\n"
            "react(main)\n"
        )
        done = self.environment.run("python", "readme.py", cwd=self.directory)
        self.assertEqual(done.stdout.splitlines(), ["('Hello, world', ['one', 'two'])"])


class TimeTests(SynchronousTestCase):
    def test_the_time_of_what_is_built_is_the_last_commits_or_the_one_that_is_given(self) -> None:
        self.patch(os, "environ", {**os.environ, "SOURCE_DATE_EPOCH": "1700000000"})
        self.assertEqual(delivery.wheels.epoch(), 1700000000)
        del os.environ["SOURCE_DATE_EPOCH"]
        self.assertGreater(delivery.wheels.epoch(), 1700000000)
