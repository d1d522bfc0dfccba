# SPDX-License-Identifier: Apache-2.0
"""Volumes on simulated clouds: many requested at once, and a soak test while the daemon is killed.

`volumes` does the former on all clouds that have volumes; `volumes:aws`, `volumes:azure`, `volumes:gcp`,
`volumes:openstack` and `volumes:vsphere` do both on one, for up to half an hour.
"""

from __future__ import annotations

from bench import clouds
from bench.figures import Report, say
from infranetes.providers.cloud.aws.bundled import offers
from infranetes.providers.cloud.gcp.sizes import prices
from infranetes_common.reactors import IReactor
from tests.support.clouds.moto import REGION
from tests.support.clouds.vcsim import PROGRAM
from tests.support.infrastructure import SOUND
from tests.support.volume_soak import VolumeOutcome, VolumeSoak, made_at_once

CLOUDS = ("aws", "azure", "gcp", "openstack", "vsphere")
LIVES = 200
WIDTH = 10
AT_ONCE = 100


async def run(reactor: IReactor, report: Report, choice: str = "") -> None:
    clouds.need_descriptions()
    offers(REGION)
    prices()
    for provider in (choice,) if choice else CLOUDS:
        if provider == "vsphere" and not PROGRAM.exists():
            report.missing["volumes:vsphere"] = f"not run: {PROGRAM} is missing: make tools"
            continue
        calls = await made_at_once(reactor, SOUND[provider], AT_ONCE)
        each = ", ".join(f"{count} {call}" for call, count in calls.most_common())
        report.add(
            "volumes", f"calls for each of {AT_ONCE} made at once, {provider}",
            sum(calls.values()) / AT_ONCE, "calls", note=each,
        )  # fmt: skip
        if choice:
            _tell(report, provider, await VolumeSoak(reactor, SOUND[provider], LIVES, WIDTH).run())


def _tell(report: Report, provider: str, outcome: VolumeOutcome) -> None:
    report.add("volumes", f"lives, {provider}", outcome.lives, "volumes", note=f"{outcome.seconds:.0f} s")
    kinds = f"at {len(outcome.killed_at)} kinds of moments"
    report.add("volumes", f"daemons killed meanwhile, {provider}", outcome.kills, "kills", note=kinds)
    for what, found in (
        ("leaked", outcome.leaked),
        ("attached twice", outcome.twice),
        ("lost", outcome.lost),
        ("kinds of calls without a kill", outcome.missed),
    ):
        report.add("volumes", f"{what}, {provider}", len(found), "", target=0, note="; ".join(found)[:300])
    for moment, count in sorted(outcome.killed_at.items()):
        say(f"  {count:4} killed {moment}")
