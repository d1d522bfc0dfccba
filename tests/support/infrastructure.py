# SPDX-License-Identifier: Apache-2.0
"""The infrastructure that a soak test's VMs run on: a farm of simulated VMs, or a simulated cloud, sound or
faulty."""

from __future__ import annotations

import contextlib
import json
import socket
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from twisted.internet.threads import deferToThread

from infranetes_common.reactors import IReactor
from tests.support import warm
from tests.support.clouds import tls, vcsim
from tests.support.clouds.aws import SimulatedAws
from tests.support.clouds.azure import SimulatedAzure
from tests.support.clouds.gce import SimulatedGce
from tests.support.clouds.openstack import SimulatedOpenStack
from tests.support.clouds.vps import DigitalOcean, SimulatedVps
from tests.support.clouds.vsphere import SimulatedVcenter
from tests.support.clouds.world import World
from tests.support.fault_rotation import ACTIONS, PREEMPTED_TURN, TURNS, FaultRotation
from txgrpc import Code

Annotations = Mapping[str, str]
WITHOUT_SPOT = ("libcloud", "openstack", "vsphere")


class Infrastructure(Protocol):
    """Makes VMs for a provider.

    :ivar provider: the provider's name.
    :ivar annotations: the annotations that pods have in turn.
    :ivar transient: errors after which a call is repeated, besides those of a daemon that ends.
    :ivar times: the daemon's table `times`.
    :ivar faults: how often each fault happened.
    """

    provider: str
    annotations: tuple[Annotations, ...]
    transient: tuple[Code, ...]
    times: dict[str, float]
    faults: Counter[str]

    def start(self) -> None:
        """Start it."""

    def table(self) -> dict[str, object]:
        """The provider's table of the configuration."""

    async def resources(self) -> dict[str, str]:
        """Everything that costs money: each resource's token tag, by its description."""

    async def inject_faults(self, over: Callable[[], bool]) -> None:
        """Make things go wrong until `over` is true."""

    async def end_vm(self, sandbox: str, number: int) -> bool:
        """End the VM of a sandbox behind the daemon's back, if it is pod `number`'s turn.

        :return: whether the VM was ended.
        """

    def may_end_daemon(self, log: str) -> bool:
        """Return whether the log shows a legitimate reason for a daemon to end by itself."""

    async def stop(self) -> None:
        """Stop it."""


class _Sound:
    """Infrastructure on which nothing goes wrong."""

    def __init__(self) -> None:
        self.transient: tuple[Code, ...] = ()
        self.times: dict[str, float] = {}
        self.faults: Counter[str] = Counter()

    async def inject_faults(self, over: Callable[[], bool]) -> None:
        """Inject none."""

    async def end_vm(self, sandbox: str, number: int) -> bool:
        return False

    def may_end_daemon(self, log: str) -> bool:
        return False


class SimulatedFarm(_Sound):
    """The farm of the provider `simulated`, which the first daemon starts."""

    provider = "simulated"
    annotations: tuple[Annotations, ...] = ({},)

    def __init__(self, root: Path) -> None:
        super().__init__()
        self._socket = root / "run" / "simulated" / "farm.sock"

    def start(self) -> None:
        """Do nothing: the daemon starts the farm."""

    def table(self) -> dict[str, object]:
        command = warm.detached("-m", "infranetes_simulation.farm")
        return {"boot_seconds": 0.05, "jitter_seconds": 0.05, "farm_command": command}

    async def resources(self) -> dict[str, str]:
        vms = await deferToThread(self._thd_ask, "list")
        return {f"VM {vm['id']} ({vm['state']})": vm["tags"]["token"] for vm in vms}

    async def stop(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            await deferToThread(self._thd_ask, "stop")

    def _thd_ask(self, op: str) -> list[Any]:
        if not self._socket.exists():
            return []
        with socket.socket(socket.AF_UNIX) as asking:
            asking.settimeout(30)
            asking.connect(str(self._socket))
            asking.sendall(json.dumps({"seq": 1, "op": op}).encode() + b"\n")
            with asking.makefile("rb") as answers:
                return list(json.loads(answers.readline()).get("vms", []))


class SimulatedCloud(_Sound):
    """A simulated cloud in this process, which outlives every daemon."""

    def __init__(self, provider: str, world: World, annotations: tuple[Annotations, ...]) -> None:
        super().__init__()
        self.provider = provider
        self.annotations = annotations
        self.world = world

    def start(self) -> None:
        self.world.start()

    def table(self) -> dict[str, object]:
        return {**self.world.table(), "allowed_elastic_addresses": ["new"]}

    async def resources(self) -> dict[str, str]:
        return dict(await deferToThread(self.world.held))

    async def stop(self) -> None:
        await self.world.stop()


class FaultyCloud(SimulatedCloud):
    """A simulated cloud with every fault that `fault_rotation` knows."""

    def __init__(self, reactor: IReactor, sound: SimulatedCloud) -> None:
        annotations = [dict(sound.annotations[turn % len(sound.annotations)]) for turn in range(TURNS)]
        if sound.provider not in WITHOUT_SPOT:
            annotations[PREEMPTED_TURN] = {"infranetes.io/spot": "true"}
        super().__init__(sound.provider, sound.world, tuple(annotations))
        # The errors of a full quota, and of revoked credentials.
        self.transient = (Code.RESOURCE_EXHAUSTED, Code.FAILED_PRECONDITION)
        self.times = {"launch": 10.0}  # seconds after which the daemon gives up VMs that never boot
        self._rotation = FaultRotation(reactor, sound.world, ACTIONS[sound.provider])
        self.faults = self._rotation.happened

    def table(self) -> dict[str, object]:
        return {**super().table(), "retry_seconds": 20.0, "call_seconds": 2.0}

    async def inject_faults(self, over: Callable[[], bool]) -> None:
        await self._rotation.run(over)

    async def end_vm(self, sandbox: str, number: int) -> bool:
        return self._rotation.end_vm(sandbox, number)

    def may_end_daemon(self, log: str) -> bool:
        """Return whether the last daemon ended because it started while the credentials were revoked."""
        return "infranetes can't start" in log.rpartition("starting up.")[2] and "credentials" in log


Factory = Callable[[IReactor, Path], Infrastructure]
CloudFactory = Callable[[IReactor, Path], SimulatedCloud]


def simulated(reactor: IReactor, root: Path) -> Infrastructure:
    """The simulated farm, without a cloud."""
    return SimulatedFarm(root)


def aws(reactor: IReactor, root: Path) -> SimulatedCloud:
    """EC2. Every other pod has an elastic address."""
    world = SimulatedAws(reactor, root / "machines")
    return SimulatedCloud("aws", world, ({}, {"infranetes.io/elastic-address": "new"}))


def gcp(reactor: IReactor, root: Path) -> SimulatedCloud:
    """Compute Engine. Every other pod has an external address."""
    world = SimulatedGce(reactor, root / "machines")
    return SimulatedCloud("gcp", world, ({}, {"infranetes.io/elastic-address": "new"}))


def azure(reactor: IReactor, root: Path) -> SimulatedCloud:
    """Azure. Every other pod has a public address."""
    world = SimulatedAzure(reactor, root / "machines")
    return SimulatedCloud("azure", world, ({}, {"infranetes.io/elastic-address": "new"}))


def libcloud(reactor: IReactor, root: Path) -> SimulatedCloud:
    """DigitalOcean, by libcloud's driver."""
    return SimulatedCloud("libcloud", SimulatedVps(reactor, root / "machines", DigitalOcean()), ({},))


def openstack(reactor: IReactor, root: Path) -> SimulatedCloud:
    """Nova. Every other pod has a floating address."""
    tls.certificate()
    world = SimulatedOpenStack(reactor, root / "machines")
    return SimulatedCloud("openstack", world, ({}, {"infranetes.io/elastic-address": "new"}))


def vsphere(reactor: IReactor, root: Path) -> SimulatedCloud:
    """A vCenter."""
    vcsim.shared()
    tls.certificate()
    return SimulatedCloud("vsphere", SimulatedVcenter(reactor, root / "machines"), ({},))


def faulty(make: CloudFactory) -> Factory:
    """Return a factory of the same cloud with faults."""
    return lambda reactor, root: FaultyCloud(reactor, make(reactor, root))


_CLOUDS: dict[str, CloudFactory] = {
    "aws": aws,
    "azure": azure,
    "gcp": gcp,
    "libcloud": libcloud,
    "openstack": openstack,
    "vsphere": vsphere,
}
SOUND: dict[str, Factory] = {"simulated": simulated, **_CLOUDS}
FAULTY: dict[str, Factory] = {name: faulty(make) for name, make in _CLOUDS.items()}
