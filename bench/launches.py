# SPDX-License-Identifier: Apache-2.0
"""A hundred VMs at once on simulated clouds, by providers with their default settings, and their calls.

What is judged is how much longer it takes than the cloud's own limits and boots do.
"""

from __future__ import annotations

import secrets
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import attrs

from bench import clouds
from bench.figures import Report
from infranetes.authority import Authority
from infranetes.providers import registry
from infranetes.providers.cloud.aws.bundled import offers
from infranetes.providers.cloud.gcp.sizes import prices
from infranetes.providers.cloud.settings import CloudSettings
from infranetes.providers.interface import InstanceSpec, IPodProvider, ProviderContext
from infranetes_common.concurrency import start
from infranetes_common.identity import Identity
from infranetes_common.reactors import IReactor
from tests.support.clouds import ec2_model
from tests.support.clouds.aws import SimulatedAws
from tests.support.clouds.ec2_buckets import Ec2Buckets
from tests.support.clouds.faults import NO_AGENT
from tests.support.clouds.gce import SimulatedGce
from tests.support.clouds.moto import REGION
from tests.support.clouds.openstack import SimulatedOpenStack

VMS = 100
BOOT_SECONDS = 45.0
TARGET = 1.05
CLUSTER, NODE = "bench", "node-1"
WAIT_SECONDS = 300.0
_DEFAULTS = {field.name for field in attrs.fields(CloudSettings)} - {"sizes"}


prepare = clouds.fetch


Simulated: TypeAlias = SimulatedAws | SimulatedGce | SimulatedOpenStack


async def run(reactor: IReactor, report: Report) -> None:
    offers(REGION)
    prices()
    ec2_model.model()
    with tempfile.TemporaryDirectory() as path:
        for name, make in (("aws", _aws), ("gcp", _gcp), ("openstack", _openstack)):
            directory = Path(path) / name
            directory.mkdir()
            world, least = make(reactor, directory)
            world.start()
            table = {key: value for key, value in world.table().items() if key not in _DEFAULTS}
            provider = registry.create(
                reactor, name, table, ProviderContext(directory, directory, CLUSTER, NODE)
            )
            try:
                await provider.start(lambda words: None)
                await _measure(provider, world, _specs(directory), least, report)
            finally:
                await provider.stop()
                await world.stop()


def _aws(reactor: IReactor, directory: Path) -> tuple[SimulatedAws, float]:
    """EC2, and the seconds that it takes by itself."""
    world = SimulatedAws(reactor, directory / "machines", CLUSTER)
    world.behaviour, world.boot_seconds = NO_AGENT, BOOT_SECONDS
    world.buckets = Ec2Buckets(reactor.seconds)
    return world, (VMS - 5) / 2.0 + BOOT_SECONDS


def _gcp(reactor: IReactor, directory: Path) -> tuple[SimulatedGce, float]:
    """Compute Engine, and the seconds that it takes by itself: it takes 100 launches at once."""
    world = SimulatedGce(reactor, directory / "machines")
    world.behaviour, world.operation_seconds = NO_AGENT, BOOT_SECONDS
    return world, BOOT_SECONDS


def _openstack(reactor: IReactor, directory: Path) -> tuple[SimulatedOpenStack, float]:
    """Nova, and the seconds that it takes by itself: it takes 100 launches at once."""
    world = SimulatedOpenStack(reactor, directory / "machines")
    world.behaviour, world.launch_seconds = NO_AGENT, BOOT_SECONDS
    return world, BOOT_SECONDS


def _specs(directory: Path) -> Sequence[InstanceSpec]:
    authority = Authority(directory)
    specs = []
    for _ in range(VMS):
        sandbox = secrets.token_hex(16)
        certificate, key = authority.issue_vm(sandbox, 3600)
        identity = Identity(
            sandbox_id=sandbox,
            certificate_pem=certificate,
            key_pem=key,
            ca_pem=authority.ca_pem,
            hostname="pod",
            machine_id=secrets.token_hex(16),
            entropy=secrets.token_hex(32),
            now_nanos=time.time_ns(),
        )
        specs.append(InstanceSpec(secrets.token_hex(16), sandbox, CLUSTER, NODE, identity))
    return specs


async def _measure(
    provider: IPodProvider,
    world: Simulated,
    specs: Sequence[InstanceSpec],
    least: float,
    report: Report,
) -> None:
    async def run_one(spec: InstanceSpec) -> str:
        launched = await provider.launch(spec)
        return (await provider.wait_running(launched.id, WAIT_SECONDS)).id

    before = len(world.requests)
    began = time.monotonic()
    running = [start(run_one(spec)) for spec in specs]
    ids = [await each for each in running]
    taken = time.monotonic() - began
    began = time.monotonic()
    ending = [provider.destroy(id) for id in ids]
    for each in ending:
        await each
    ended = time.monotonic() - began
    calls = Counter(call["Action"] for call in world.requests[before:])
    note = ", ".join(f"{count} {call}" for call, count in calls.most_common())
    name = provider.name
    report.add(
        "launches", f"{VMS} VMs at once until all run, {name}", taken, "s", note=f"by itself {least:g} s"
    )
    report.add("launches", f"beside what the cloud takes by itself, {name}", taken / least, "x", TARGET)
    report.add("launches", f"their ends until the cloud has taken them, {name}", ended, "s")
    report.add("launches", f"calls for each VM's life, {name}", sum(calls.values()) / VMS, "calls", note=note)
