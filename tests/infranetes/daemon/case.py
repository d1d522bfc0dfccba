# SPDX-License-Identifier: Apache-2.0
"""What the tests of the daemon as a process share."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs
from twisted.internet import reactor as the_reactor
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import UNIXClientEndpoint
from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from infranetes.firewalls.agent_ports import table_name as agents_table
from infranetes.images import ImagesConfig, ImageStore
from infranetes_common.wire import cri
from infranetes_common.wire.cri_rpcs import ImageStub, RuntimeStub
from infranetes_simulation.provider.farm_client import FarmClient
from tests.support import warm
from tests.support.kept import KeptCase
from tests.support.oci import busybox
from tests.support.registry import Registry
from txgrpc import Channel, Code, GrpcError
from txgrpc.channel import Backoff

reactor: Any = the_reactor

ROOT = Path(__file__).resolve().parents[3]
START_SECONDS = 60.0
IMAGE = "busybox"
_OFTEN = Backoff(first=0.02, most=0.1)  # since most daemons are there in a moment
FARM = "infranetes_simulation.farm"
_TWISTD = (sys.executable, *warm.TWISTD)


@attrs.frozen
class Images:
    """A state directory's `images` that has busybox, and the names that busybox has in it."""

    path: Path
    reference: str


_made: list[Images] = []


async def images() -> Images:
    """Return the images, which are made once per run of the tests."""
    if not _made:
        directory = Path(tempfile.mkdtemp(prefix="infranetes-images-"))
        atexit.register(shutil.rmtree, directory, True)
        registry = await deferToThread(Registry().start)
        try:
            reference = await deferToThread(registry.push, IMAGE, "latest", busybox())
            config = ImagesConfig(insecure_registries=(registry.host,))
            store = ImageStore(reactor, directory / "images", config)
            await store.start()
            await store.pull(reference)
            await store.stop()
        finally:
            await deferToThread(registry.stop)
        _made.append(Images(directory / "images", reference))
    return _made[0]


def toml(table: Mapping[str, Any], prefix: str = "") -> str:
    """Return `table` as TOML."""
    lines = [f"{key} = {json.dumps(value)}" for key, value in table.items() if not isinstance(value, dict)]
    for key, value in table.items():
        if isinstance(value, dict):
            lines += [f"[{prefix}{key}]", toml(value, f"{prefix}{key}.")]
    return "\n".join(lines)


class DaemonCase(KeptCase, TestCase):
    """A directory, and daemons that use it one after the other. Their logs are kept when the test fails.

    :ivar config: the content of the configuration file; change it before `start`.
    :ivar constants: other values for constants of the daemon's modules, by their full names.
    """

    #: The factor for timeouts, greater than 1 where machines are slower than simulated ones.
    patience = 1.0
    #: Conditions in Status that pods don't need. containerd 2 has one that warns of deprecated features.
    unneeded = frozenset({"ContainerdHasNoDeprecationWarnings"})
    #: The source tree from which the daemon is run.
    tree = ROOT
    #: Whether daemons are started as a user would start them, and not by `warm`.
    cold = False

    @classmethod
    def setUpClass(cls) -> None:
        warm.wait_until_ready()  # here, where no test's time is spent

    def setUp(self) -> None:
        self.root = self.make_root()
        self.addCleanup(shutil.rmtree, self.root, True)
        self.socket = self.root / "run" / "infranetes.sock"
        self.log_directory = self.root / "pods"
        self.log_directory.mkdir()
        self.config: dict[str, Any] = {
            "socket": str(self.socket),
            "state_dir": str(self.root / "state"),
            "run_dir": str(self.root / "run"),
            "provider": "simulated",
            "log": {"level": "debug"},
            "providers": {"simulated": {"boot_seconds": 0.05, "jitter_seconds": 0.0}},
        }
        self.environment: dict[str, str] = {}
        self.constants: dict[str, float] = {}
        self.config["providers"]["simulated"]["farm_command"] = warm.detached("-m", FARM)
        self.process: subprocess.Popen[bytes] | warm.Process | None = None
        self.channel: Channel | None = None
        self.addCleanup(lambda: Deferred.fromCoroutine(self.end_everything()))

    def make_root(self) -> Path:
        """Make the test's directory. Not trial's own, since a socket's path has to be short."""
        return Path(tempfile.mkdtemp(prefix="inf-"))

    def written(self) -> str:
        """Return the text of the configuration file."""
        return toml(self.config)

    # ---- what is kept when it fails

    def kept_logs(self) -> Iterable[Path]:
        """Return the logs of the daemons, the containers and the VMs."""
        if "root" not in vars(self):  # it failed before
            return ()
        vms = (self.root / "state/qemu/vms").glob("*/*.log")
        return (
            self.root / "daemon.log",
            self.root / "run/simulated/farm.log",
            *self.log_directory.glob("*/*.log"),
            *vms,
        )

    def ways_in(self) -> Iterable[str]:
        """Return commands for the daemon and its VMs."""
        if not self.alive or self.process is None:
            yield f"tail {self.root}/daemon.log    # the daemon has ended"
            return
        yield f"tail -f {self.root}/daemon.log    # of process {self.process.pid}"
        yield f"{ROOT}/build/tools/crictl --runtime-endpoint unix://{self.socket} pods"
        ctl = f"{sys.executable} -m infranetes.ctl.cli --config {self.root}/infranetes.toml"
        yield f"cd {ROOT}; {ctl} pods    # describe, logs, console POD"

    # ---- the process

    def spawn(
        self, *flags: str, crash: tuple[str, int] | None = None, background: str = ""
    ) -> subprocess.Popen[bytes] | warm.Process:
        """Start a daemon and don't wait. `background`: the pid file of a daemon that detaches itself."""
        path = self.root / "infranetes.toml"
        path.write_text(self.written())
        command = list(_TWISTD)
        if self.constants:
            changed = json.dumps(self.constants)
            command = [sys.executable, "-m", "tests.infranetes.daemon.constants", changed]
        if crash is not None:
            journal = str(self.root / "journal")
            module = "tests.infranetes.daemon.crashing"
            command = [sys.executable, "-m", module, crash[0], str(crash[1]), journal]
        command += [f"--pidfile={background}"] if background else ["--nodaemon", "--pidfile="]
        command += ["infranetes", "--config", str(path), *flags]
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.tree),
            "PYTHONUNBUFFERED": "1",
            **self.environment,
        }
        with open(self.root / "daemon.log", "ab") as log:
            if not self.cold and self.tree == ROOT and command[0] == sys.executable:
                return warm.Process(command[1:], log.fileno(), ROOT, environment)
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.tree, env=environment
            )

    @property
    def log(self) -> str:
        """Return what the daemons of this test have logged."""
        return (self.root / "daemon.log").read_text(errors="replace")

    async def start(self, *flags: str, crash: tuple[str, int] | None = None) -> None:
        """Start a daemon; return when its provider is ready, or when the daemon has ended."""
        made = await images()
        self.image = made.reference
        if not (self.root / "state" / "images").exists():
            shutil.copytree(made.path, self.root / "state" / "images")
        self.process = self.spawn(*flags, crash=crash)
        await self.connect()

    async def connect(self) -> None:
        await self.disconnect()
        endpoint = UNIXClientEndpoint(reactor, str(self.socket))
        self.channel = Channel(reactor, endpoint, backoff=_OFTEN)
        self.runtime = RuntimeStub(self.channel)
        self.image_service = ImageStub(self.channel)
        until = time.monotonic() + START_SECONDS * self.patience
        while time.monotonic() < until and self.alive:
            try:
                status = await self.runtime.Status(cri.StatusRequest(), timeout=5.0)
                if self.is_ready(status.status):
                    return
            except GrpcError:
                pass
            await self.sleep(0.05)
        if self.alive:
            self.fail(f"the daemon is not ready:\n{self.log}")

    def is_ready(self, status: Any) -> bool:
        """Return whether the node can run pods, according to Status."""
        return all(each.status for each in status.conditions if each.type not in self.unneeded)

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    async def disconnect(self) -> None:
        channel, self.channel = self.channel, None
        if channel is not None:
            await channel.close()

    async def ended(self, seconds: float = 30.0) -> int:
        """Wait for the daemon to end by itself. Return its exit status; another may then start."""
        process = self.process
        assert process is not None
        await self.until(lambda: process.poll() is not None, "the daemon ends", seconds)
        assert process.returncode is not None
        return process.returncode

    async def kill(self) -> None:
        """Send SIGKILL at once, and wait for the end."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        await self.ended()

    async def restart(self, *flags: str) -> None:
        """Kill the daemon and start another."""
        await self.kill()
        await self.start(*flags)

    async def end_everything(self) -> None:
        await self.disconnect()
        if self.process is not None and self.alive:
            self.process.terminate()
            try:
                await self.ended(15.0)
            finally:
                self.process.kill()
                self.process.wait()
        if (self.root / "run" / "simulated" / "farm.sock").exists():
            farm = self._farm()
            try:
                await farm.request("list")
                await farm.stop(end_farm=True)
            except Exception:
                await farm.stop(end_farm=False)
        if shutil.which("nft") is not None:  # a daemon leaves the table in force for VMs that live on
            table = agents_table(Path(self.config["state_dir"]))
            command = ["nft", "delete", "table", "inet", table]
            await deferToThread(subprocess.run, command, capture_output=True, check=False)

    # ---- requests

    def pod(self, name: str = "web", attempt: int = 0, **fields: Any) -> Any:
        metadata = cri.PodSandboxMetadata(name=name, uid=f"uid-{name}", namespace="default", attempt=attempt)
        return cri.PodSandboxConfig(metadata=metadata, log_directory=str(self.log_directory / name), **fields)

    def box(self, name: str = "main", script: str = "", attempt: int = 0, **fields: Any) -> Any:
        metadata = cri.ContainerMetadata(name=name, attempt=attempt)
        if script:
            fields["command"] = ["sh", "-c", script]
        fields.setdefault("image", cri.ImageSpec(image=self.image))
        return cri.ContainerConfig(metadata=metadata, log_path=f"{name}.log", **fields)

    async def run_pod(self, name: str = "web", config: Any = None, **fields: Any) -> str:
        request = cri.RunPodSandboxRequest(config=config or self.pod(name, **fields))
        (self.log_directory / name).mkdir(exist_ok=True)
        seconds = 60.0 * self.patience
        begun = time.monotonic()
        try:
            answer = await self.runtime.RunPodSandbox(request, timeout=seconds)
        except GrpcError as error:
            if error.code is Code.DEADLINE_EXCEEDED and time.monotonic() - begun >= seconds:
                self.fail(f"{error}\n{self.log[-20_000:]}")  # the log file is gone after the test
            raise
        return str(answer.pod_sandbox_id)

    async def create(self, sandbox: str, config: Any = None) -> str:
        request = cri.CreateContainerRequest(pod_sandbox_id=sandbox, config=config or self.box())
        return str((await self.runtime.CreateContainer(request, timeout=60.0 * self.patience)).container_id)

    async def run_container(self, sandbox: str, config: Any = None) -> str:
        container = await self.create(sandbox, config)
        request = cri.StartContainerRequest(container_id=container)
        await self.runtime.StartContainer(request, timeout=30.0 * self.patience)
        return container

    async def stop_pod(self, sandbox: str) -> None:
        request = cri.StopPodSandboxRequest(pod_sandbox_id=sandbox)
        await self.runtime.StopPodSandbox(request, timeout=60.0 * self.patience)

    async def remove_pod(self, sandbox: str) -> None:
        request = cri.RemovePodSandboxRequest(pod_sandbox_id=sandbox)
        await self.runtime.RemovePodSandbox(request, timeout=60.0 * self.patience)

    async def sandboxes(self, **wanted: Any) -> list[Any]:
        request = cri.ListPodSandboxRequest(filter=cri.PodSandboxFilter(**wanted))
        return list((await self.runtime.ListPodSandbox(request, timeout=10.0)).items)

    async def containers(self, **wanted: Any) -> list[Any]:
        request = cri.ListContainersRequest(filter=cri.ContainerFilter(**wanted))
        return list((await self.runtime.ListContainers(request, timeout=10.0)).containers)

    async def container_status(self, container: str) -> Any:
        request = cri.ContainerStatusRequest(container_id=container)
        return (await self.runtime.ContainerStatus(request, timeout=10.0)).status

    async def in_state(self, container: str, state: int, seconds: float = 60.0) -> Any:
        """Wait until a container has this state. Return its status."""
        until = time.monotonic() + seconds * self.patience
        while True:
            status = await self.container_status(container)
            if status.state == state:
                return status
            if time.monotonic() > until:
                self.fail(f"container {container} is not {state}: {status}\n{self.log[-3000:]}")
            await self.sleep(0.05)

    async def refused(self, code: Code, call: Any) -> str:
        """Check that `call` fails with this code. Return its message."""
        try:
            answer = await call
        except GrpcError as error:
            self.assertEqual(error.code, code, error.message)
            return str(error.message)
        self.fail(f"not refused: {answer}")
        return ""

    # ---- the farm of simulated VMs

    def _farm(self) -> FarmClient:
        directory = self.root / "run" / "simulated"
        return FarmClient(reactor, ["/bin/false"], directory, directory, lambda vms: None, lambda *_: None)

    async def farm(self, op: str, **fields: Any) -> Mapping[str, Any]:
        """Send a request to the farm without the daemon's knowledge."""
        farm = self._farm()
        try:
            return await farm.request(op, **fields)
        finally:
            await farm.stop(end_farm=False)

    async def vms(self) -> list[Mapping[str, Any]]:
        """Return all VMs of the farm."""
        if not (self.root / "run" / "simulated" / "farm.sock").exists():
            return []
        return list((await self.farm("list"))["vms"])

    # ---- time

    async def sleep(self, seconds: float) -> None:
        await deferLater(reactor, seconds, lambda: None)

    async def until(self, true: Callable[[], Any], what: str, seconds: float = 60.0) -> None:
        until = time.monotonic() + seconds * self.patience
        while not true():
            if time.monotonic() > until:
                self.fail(f"not in {seconds:.0f} s: {what}\n{self.log[-3000:]}")
            await self.sleep(0.03)
