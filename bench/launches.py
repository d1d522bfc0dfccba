# SPDX-License-Identifier: Apache-2.0
"""A hundred VMs launched at once on simulated clouds, by providers with default settings; their API calls.

The target is how much longer this takes than the cloud's own limits and boot times require. `launches` runs
on EC2, Compute Engine and Nova; `launches:azure` and `launches:vsphere` run on these.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from bench import clouds
from bench.figures import Report
from infranetes.providers.cloud.aws.bundled import offers
from infranetes.providers.cloud.gcp.sizes import prices
from infranetes.providers.interface import InstanceSpec, IPodProvider
from infranetes_common.concurrency import start
from infranetes_common.reactors import IReactor
from tests.support.clouds import ec2_model
from tests.support.clouds.moto import REGION

VMS = 100
TARGET = 1.05
WAIT_SECONDS = 300.0
CLOUDS = ("aws", "gcp", "openstack")
# The least time that the launches take: EC2's token bucket holds five launches and gets two a second. The
# other clouds accept all launches at once.
_LEAST = {"aws": (VMS - 5) / 2.0 + clouds.BOOT_SECONDS}


async def run(reactor: IReactor, report: Report, choice: str = "") -> None:
    offers(REGION)
    prices()
    ec2_model.model()
    with tempfile.TemporaryDirectory() as path:
        for name in (choice,) if choice else CLOUDS:
            directory = Path(path) / name
            directory.mkdir()
            world = clouds.simulated(reactor, name, directory)
            provider = clouds.provider(reactor, name, world, directory)
            least = _LEAST.get(name, clouds.BOOT_SECONDS)
            try:
                await provider.start(lambda words: None)
                await _measure(provider, world, clouds.specs(directory, VMS), least, report)
            finally:
                await provider.stop()
                await world.stop()


async def _measure(
    provider: IPodProvider,
    world: clouds.Simulated,
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
