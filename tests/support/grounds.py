"""What pods' lives are lived on: a farm of simulated VMs, or a simulated cloud."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from twisted.internet.threads import deferToThread

from tests.support.clouds import tls, vcsim
from tests.support.clouds.aws import AwsWorld
from tests.support.clouds.gce import GceWorld
from tests.support.clouds.vsphere import VsphereWorld

Wishes = Mapping[str, str]


class Ground(Protocol):
    """:ivar provider: its name. :ivar wishes: annotations, of one pod after the other and then again."""

    provider: str
    wishes: tuple[Wishes, ...]

    def start(self) -> None:
        """Have it."""

    def table(self) -> dict[str, Any]:
        """The provider's configuration."""

    async def held(self) -> dict[str, str]:
        """All that costs money, in words, and the token that it is tagged with."""

    async def stop(self) -> None:
        """Take it away."""


class FarmGround:
    """The provider `simulated`'s own, which its first daemon starts."""

    provider = "simulated"
    wishes: tuple[Wishes, ...] = ({},)

    def __init__(self, root: Path) -> None:
        self._socket = root / "run" / "simulated" / "farm.sock"

    def start(self) -> None:
        """The daemon does."""

    def table(self) -> dict[str, Any]:
        return {"boot_seconds": 0.05, "jitter_seconds": 0.05}

    async def held(self) -> dict[str, str]:
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


class CloudGround:
    """A simulated cloud in this process, so that it outlives every daemon."""

    def __init__(self, provider: str, world: Any, wishes: tuple[Wishes, ...]) -> None:
        self.provider = provider
        self.wishes = wishes
        self._world = world

    def start(self) -> None:
        self._world.start()

    def table(self) -> dict[str, Any]:
        return dict(self._world.table())

    async def held(self) -> dict[str, str]:
        return dict(await deferToThread(self._world.held))

    async def stop(self) -> None:
        await self._world.stop()


Make = Callable[[Any, Path], Ground]


def simulated(reactor: Any, root: Path) -> Ground:
    """No cloud."""
    return FarmGround(root)


def aws(reactor: Any, root: Path) -> Ground:
    """EC2. Every other pod has an elastic address."""
    world = AwsWorld(reactor, root / "machines")
    return CloudGround("aws", world, ({}, {"infranetes.io/elastic-address": "new"}))


def gcp(reactor: Any, root: Path) -> Ground:
    """Compute Engine. Every other pod has an external address."""
    world = GceWorld(reactor, root / "machines")
    return CloudGround("gcp", world, ({}, {"infranetes.io/elastic-address": "new"}))


def vsphere(reactor: Any, root: Path) -> Ground:
    """A vCenter."""
    vcsim.shared()
    tls.certificate()
    return CloudGround("vsphere", VsphereWorld(reactor, root / "machines"), ({},))


GROUNDS: dict[str, Make] = {"simulated": simulated, "aws": aws, "gcp": gcp, "vsphere": vsphere}
