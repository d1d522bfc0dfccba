# SPDX-License-Identifier: Apache-2.0
"""A soak test: volumes live on a simulated cloud while the daemon is killed at one call to the cloud after
another. No volume is leaked, attached twice, or lost.

In its life a volume is made, attached to a VM, refused to another, detached, (every third) attached to that
other VM and detached again, and deleted. Several lives go on in parallel, in a process (`volume_daemon`) that
is killed as one of its calls arrives: `before` the cloud performs it, or `after` that, but before the cloud
answers. Then the next process gets the same step again. After each step the test looks at what the cloud
really has.

Simulated VMs have no disks, so nothing is mounted here.
"""

from __future__ import annotations

import random
import secrets
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.defer import gatherResults
from twisted.internet.threads import deferToThread

from infranetes.identity.authority import Authority
from infranetes.providers import registry
from infranetes.providers.cloud.interface import CLUSTER
from infranetes.providers.cloud.volumes.disks import VOLUME
from infranetes.providers.interface import InstanceSpec, ProviderContext
from infranetes.providers.volumes import IHasVolumes
from infranetes_common.concurrency import sleep, start
from infranetes_common.identity import Identity
from infranetes_common.reactors import IReactor
from tests.support.clouds.faults import NO_AGENT, Fault, FaultKind, Faults
from tests.support.volume_daemons import Daemon, Forker

GIB = 1 << 30
NODE = "soak"
STEP_SECONDS = 600.0  # enough for daemons that are killed in the middle of a step
# The number of calls after which a daemon is killed at the latest. vSphere needs several calls where others
# need one.
_FARTHEST: Mapping[str, int] = {"aws": 40, "azure": 40, "gcp": 40, "openstack": 40, "vsphere": 300}
WHEN = {"before": FaultKind.ERROR, "after": FaultKind.LOST}
# The calls of a volume's life that change something, and one that only looks, by the cloud's provider.
CALLS: Mapping[str, tuple[str, ...]] = {
    "aws": ("CreateVolume", "AttachVolume", "DetachVolume", "DeleteVolume", "DescribeVolumes"),
    "azure": ("create disks", "attach disk", "detach disk", "delete disks", "operation"),
    "gcp": ("create disk", "attach disk", "detach disk", "delete disk", "operation"),
    "openstack": ("create volumes", "attach", "detach", "delete volumes", "look at volumes"),
    "vsphere": (
        "CreateVirtualDisk_Task",
        "RegisterDisk",
        "SetVStorageObjectControlFlags",
        "AttachDisk_Task",
        "DetachDisk_Task",
        "DeleteVStorageObject_Task",
    ),
}
Holders = Mapping[str, list[str]]
"""The VMs that each volume is attached to, by the volume's id."""


def _thd_aws(world: Any, cluster: str) -> Holders:
    ours = [{"Name": f"tag:{CLUSTER}", "Values": [cluster]}, {"Name": "tag-key", "Values": [VOLUME]}]
    found = world.ec2.describe_volumes(Filters=ours)["Volumes"]
    return {one["VolumeId"]: [each["InstanceId"] for each in one["Attachments"]] for one in found}


def _thd_azure(world: Any, cluster: str) -> Holders:
    """Only what Azure says that a disk has: a VM may list what it is still being given."""
    return {
        name: [holder.split("/")[-1]] if (holder := disk.get("managedBy")) else []
        for name, disk in list(world.arm.of["disks"].items())
        if VOLUME in disk["tags"] and disk["properties"]["provisioningState"] != "Deleting"
    }


def _thd_gcp(world: Any, cluster: str) -> Holders:
    return {
        f"{zone}.{name}": [each.split("/")[-1] for each in disk.get("users") or ()]
        for (zone, name), disk in list(world.api.disks.items())
        if VOLUME in disk["labels"] and disk.get("status") != "DELETING"
    }


def _thd_openstack(world: Any, cluster: str) -> Holders:
    cinder = world.api.cinder
    attached = list(cinder.attachments.values())
    return {
        id: [each["instance"] for each in attached if each["volume_id"] == id]
        for id, one in list(cinder.volumes.items())
        if one["metadata"].get(CLUSTER) == cluster and VOLUME in one["metadata"]
    }


def _thd_vsphere(world: Any, cluster: str) -> Holders:
    return {id: [vm.name for vm in world.disks.users(id)] for id in world.disks.ids()}


VIEWS: Mapping[str, Callable[[Any, str], Holders]] = {
    "aws": _thd_aws,
    "azure": _thd_azure,
    "gcp": _thd_gcp,
    "openstack": _thd_openstack,
    "vsphere": _thd_vsphere,
}


@attrs.define
class VolumeOutcome:
    """The result of a soak test."""

    lives: int = 0
    kills: int = 0
    killed_at: Counter[str] = attrs.field(factory=Counter)  # kills by when and at which call
    missed: list[str] = attrs.field(factory=list)  # the pairs of `WHEN` and `CALLS` without a kill
    leaked: list[str] = attrs.field(factory=list)
    twice: list[str] = attrs.field(factory=list)  # volumes that were attached to two VMs
    lost: list[str] = attrs.field(factory=list)  # lost volumes, and whatever else went wrong with a life
    seconds: float = 0.0


class _Kills(Faults):
    """The faults of a world in which a daemon is killed."""

    def __init__(self, arriving: Callable[[str], Fault | None]) -> None:
        super().__init__()
        self._arriving = arriving

    def befalling(self, parameters: dict[str, str]) -> Fault | None:
        return super().befalling(parameters) or self._arriving(parameters.get("Action", ""))


class VolumeSoak:
    """One soak test.

    :param cloud: makes a simulated cloud, as those in `infrastructure.SOUND` do.
    :param lives: how many lives there are, `width` at a time.
    :param seconds: the time after which no life is begun and no daemon is killed, unless none was killed yet.
    """

    def __init__(
        self,
        reactor: IReactor,
        cloud: Callable[[IReactor, Path], Any],
        lives: int,
        width: int = 5,
        seed: int = 1,
        seconds: float = 1e9,
    ) -> None:
        self._reactor = reactor
        self.root = Path(tempfile.mkdtemp(prefix="inf-"))
        self._cloud = cloud(reactor, self.root)
        self._names = iter(range(lives))
        self._width = width
        self._seconds = seconds
        self._began = 0.0
        self._random = random.Random(seed)  # noqa: S311
        self._cluster = f"soak-{secrets.token_hex(4)}"
        self._daemon: Daemon | None = None
        self._target = ("", "")
        self._left = 0  # the number of calls after which the daemon is killed in any case
        self._numbers = iter(range(1, 10**9))
        self._done = False
        self.outcome = VolumeOutcome()

    async def run(self) -> VolumeOutcome:
        """Run the whole test, and leave no process behind."""
        world = self._cloud.world
        world.behaviour = NO_AGENT
        self._cloud.start()
        world.faults = _Kills(self._arriving)
        try:
            vms = await self._launch(2 * self._width)
            supervisor = start(self._supervise())
            self._began = time.monotonic()
            pairs = [vms[2 * number : 2 * number + 2] for number in range(self._width)]
            await gatherResults([start(self._live(pair)) for pair in pairs], consumeErrors=True)
            self._done = True
            self._kill()
            await supervisor
            await self._check_nothing_left()
        finally:
            self._done = True
            self._kill()
            await self._cloud.stop()
            shutil.rmtree(self.root, ignore_errors=True)
        self._count_missed()
        self.outcome.seconds = time.monotonic() - self._began
        return self.outcome

    # ---- VMs, and what is left at the end

    def _provider(self) -> Any:
        context = ProviderContext(self.root, self.root, self._cluster, NODE)
        return registry.create(self._reactor, self._cloud.provider, _table(self._cloud), context)

    async def _launch(self, count: int) -> list[str]:
        """Launch VMs, by a provider in this process, which is not killed; return their ids."""
        authority, provider = Authority(str(self.root / "authority")), self._provider()
        await provider.start(lambda words: None)
        found = []
        for _ in range(count):
            sandbox = secrets.token_hex(16)
            certificate, key = authority.issue_vm(sandbox, 3600)
            identity = Identity(sandbox, certificate, key, authority.ca_pem)
            spec = InstanceSpec(secrets.token_hex(16), sandbox, self._cluster, NODE, identity)
            launched = await provider.launch(spec)
            found.append((await provider.wait_running(launched.id, STEP_SECONDS)).id)
        await provider.stop()
        return found

    async def _check_nothing_left(self) -> None:
        provider = self._provider()
        await provider.start(lambda words: None)
        listed = await IHasVolumes(provider).volumes.list()
        self.outcome.leaked += [f"{disk.id} is listed at the end" for disk in listed]
        self.outcome.leaked += [f"{id} is left, held by {vms}" for id, vms in (await self._holders()).items()]
        for instance in await provider.list():
            await provider.destroy(instance.id)
        await provider.stop()

    async def _holders(self) -> Holders:
        """Return the volumes that the cloud really has, with their VMs."""
        found = await deferToThread(VIEWS[self._cloud.provider], self._cloud.world, self._cluster)
        self.outcome.twice += [f"{id} is attached to {vms}" for id, vms in found.items() if len(vms) > 1]
        return found

    # ---- the daemons

    async def _supervise(self) -> None:
        """Run one daemon after another, until all lives are over."""
        forker = Forker(self._reactor, self._cloud.provider, str(self.root / "daemons"))
        try:
            while not self._done:
                await self._have(await forker.daemon())
        except (EOFError, AssertionError) as error:
            self.outcome.lost.append(f"no daemon starts: {error} {forker.errors.decode()}")
            self._done = True
        finally:
            await forker.stop()

    async def _have(self, daemon: Daemon) -> None:
        """Start a daemon, and keep it until it is killed or all lives are over."""
        about = {"provider": self._cloud.provider, "table": _table(self._cloud), "node": NODE}
        await daemon.begin({**about, "cluster": self._cluster, "root": str(self.root)})
        self._aim()
        self._daemon = daemon
        while not daemon.ended:
            if self._done:
                daemon.kill()
            await sleep(self._reactor, 0.01)
        self._daemon = None

    def _aim(self) -> None:
        """Choose the call at which the next daemon is killed: one at which the fewest were killed so far."""
        moments = [(when, call) for when in WHEN for call in CALLS[self._cloud.provider]]
        self._random.shuffle(moments)
        self._target = min(moments, key=lambda moment: self.outcome.killed_at[" ".join(moment)])
        self._left = _FARTHEST[self._cloud.provider]

    def _arriving(self, call: str) -> Fault | None:
        """Return the fault of a daemon's call that has arrived; kill the daemon if it is its time."""
        if self._daemon is None or self._daemon.ended or (self._late() and self.outcome.kills):
            return None
        self._left -= 1
        when, wanted = self._target
        if call != wanted and self._left:
            return None
        self._kill()
        self.outcome.kills += 1
        self.outcome.killed_at[f"{when} {call}"] += 1
        return Fault(WHEN[when])

    def _kill(self) -> None:
        daemon, self._daemon = self._daemon, None
        if daemon is not None:
            daemon.kill()

    def _count_missed(self) -> None:
        moments = [f"{when} {call}" for when in WHEN for call in CALLS[self._cloud.provider]]
        self.outcome.missed = [moment for moment in moments if not self.outcome.killed_at[moment]]

    # ---- the lives

    def _late(self) -> bool:
        return time.monotonic() - self._began > self._seconds

    async def _live(self, vms: list[str]) -> None:
        """Take one volume after another through its life while there is time, but at least one."""
        for count, number in enumerate(self._names):
            if self._done or (count and self._late()):
                return
            try:
                await self._life(number, *vms)
                self.outcome.lives += 1
            except Exception as error:
                self.outcome.lost.append(f"data-{number}: {type(error).__name__}: {error}")

    async def _life(self, number: int, first: str, second: str) -> None:
        volume = await self._step("create", f"data-{number}", GIB)
        self._expect(await self._holders(), volume, 0)
        for vm, other in ((first, second), (second, first))[: 2 if number % 3 == 0 else 1]:
            await self._step("attach", vm, volume, False)
            self._expect(await self._holders(), volume, 1)
            await self._step("attach", other, volume, False, refused="FailedPrecondition")
            self._expect(await self._holders(), volume, 1)
            await self._step("detach", vm, volume)
            self._expect(await self._holders(), volume, 0)
        await self._step("delete", volume)
        left = await self._holders()
        if volume in left:
            self.outcome.leaked.append(f"{volume} is there after it was deleted")

    @staticmethod
    def _expect(found: Holders, volume: str, count: int) -> None:
        if volume not in found:
            raise AssertionError(f"{volume} is lost")
        if len(found[volume]) != count:
            raise AssertionError(f"{volume} is attached to {found[volume]}: {count} expected")

    async def _step(self, call: str, *arguments: object, refused: str = "") -> Any:
        """Repeat a call until a daemon lives to answer it, and not with Unavailable; return its result."""
        until = time.monotonic() + STEP_SECONDS
        words = "there is no daemon"
        while time.monotonic() < until:
            daemon = self._daemon
            if self._done:
                break
            if daemon is not None:
                try:
                    found = await daemon.ask(next(self._numbers), {"call": call, "arguments": arguments})
                except EOFError:
                    continue
                error = found.get("error", "")
                if error == refused:
                    return found["result"]
                words = f"{error} {found.get('words')}"
                if error != "Unavailable":
                    break
            await sleep(self._reactor, 0.05)
        raise AssertionError(f"{call} {arguments}: {words}")


def _table(cloud: Any) -> dict[str, object]:
    """Return a simulated cloud's table, with longer timeouts, as calls may take long on a busy machine."""
    return {**cloud.table(), "call_seconds": 30.0, "retry_seconds": 120.0, "threads": 8}


async def made_at_once(reactor: IReactor, cloud: Callable[[IReactor, Path], Any], count: int) -> Counter[str]:
    """Create many volumes at once; return the number of calls to the cloud, by action."""
    root = Path(tempfile.mkdtemp(prefix="inf-"))
    made = cloud(reactor, root)
    made.start()
    try:
        context = ProviderContext(root, root, f"soak-{secrets.token_hex(4)}", NODE)
        provider = registry.create(reactor, made.provider, _table(made), context)
        await provider.start(lambda words: None)
        volumes = IHasVolumes(provider).volumes
        begun = len(made.world.requests)
        disks = await gatherResults([volumes.create(f"data-{number}", GIB) for number in range(count)])
        calls = Counter(call["Action"] for call in made.world.requests[begun:])
        await gatherResults([volumes.delete(disk.id) for disk in disks])
        await provider.stop()
    finally:
        await made.stop()
        shutil.rmtree(root, ignore_errors=True)
    return calls
