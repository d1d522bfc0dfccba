# SPDX-License-Identifier: Apache-2.0
"""Soak tests: pods run and end while their daemon is killed at each write to its store in turn.

`lives` runs on simulated VMs; `lives:aws`, `lives:azure` and so on run on a cloud simulated over HTTP, whose
VMs have real agents, and `lives:clouds` on all of them; `lives:troubles-aws` and so on run on one with faults
(`tests.support.fault_rotation`), and `lives:troubles` on all of these. Those on clouds take up to half an
hour and run only when named. So does `lives:mixed`: containerd's pods and VMs side by side, where both
daemons are killed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from bench import clouds
from bench.figures import Report, say
from infranetes_common.concurrency import run_in_thread
from infranetes_common.reactors import IReactor
from tests.support import mixed_soak
from tests.support.clouds.vcsim import PROGRAM
from tests.support.crash_soak import LASTING, CrashSoak, Outcome
from tests.support.fault_rotation import ALL
from tests.support.infrastructure import FAULTY, SOUND

CLOUDS = ("aws", "azure", "gcp", "openstack", "vsphere")
TROUBLES = "troubles"
PODS = 200
WIDTH = 10
POOL = 5
PORTIONS = 4  # of those on a mixed node, each with a containerd of its own


async def run(reactor: IReactor, report: Report, choice: str = "simulated") -> None:
    if choice.startswith(TROUBLES):
        named = choice.removeprefix(TROUBLES).removeprefix("-")
        await _faulty(reactor, report, (named,) if named else CLOUDS)
        return
    if choice == "mixed":
        await _mixed(reactor, report)
        return
    for provider in CLOUDS if choice == "clouds" else (choice,):
        if _missing(report, provider):
            continue
        where = "" if provider == "simulated" else f", {provider}"
        for pool, label in ((0, where), (POOL, f"{where}, pool of {POOL}")):
            soak = CrashSoak(
                reactor, PODS // 2, WIDTH, pool=pool, seed=pool + 1, infrastructure=SOUND[provider]
            )
            try:
                _tell(report, label, await soak.run())
            finally:
                soak.clean()


async def _faulty(reactor: IReactor, report: Report, providers: Sequence[str]) -> None:
    for provider in providers:
        if _missing(report, provider):
            continue
        soak = CrashSoak(reactor, PODS // 2, WIDTH, infrastructure=FAULTY[provider])
        try:
            outcome = await soak.run()
        finally:
            soak.clean()
        _tell(report, f", {provider} with troubles", outcome)
        for fault in ALL:
            report.add("lives", f"{provider}: {fault}", outcome.faults[fault], "times")


async def _mixed(reactor: IReactor, report: Report) -> None:
    """Run them in portions, each told when it is over, so that what has been seen stays known."""
    for seed in range(1, PORTIONS + 1):
        portion = functools.partial(
            mixed_soak.run,
            PODS // PORTIONS,
            WIDTH,
            math.inf,
            seed=seed,
            say=lambda words: say(f"    {words}"),
        )
        _tell_mixed(report, f"on a mixed node, seed {seed}", await run_in_thread(reactor, portion))


def _tell_mixed(report: Report, where: str, found: mixed_soak.Found) -> None:
    report.add("lives", f"lifecycles {where}", found["pods"], "pods", note=f"{found['seconds']:.0f} s")
    report.add("lives", f"daemons killed meanwhile {where}", found["kills"], "kills")
    report.add("lives", f"containerds killed meanwhile {where}", found["containerd_kills"], "kills")
    report.add("lives", f"pods half made, and begun again {where}", found["again"], "times")
    leaked, lost, own = found["leaked"], found["lost"], found["of_containerd_itself"]
    report.add("lives", f"VMs, sandboxes, shadows and records leaked {where}", len(leaked), "", target=0)
    report.add("lives", f"pods lost {where}", len(lost), "", target=0)
    gone = found["lasting"] - found["lasted"]
    report.add("lives", f"pods that ran all the time, not found again {where}", gone, "", target=0)
    for what, left in (
        ("namespaces", own["namespaces"]),
        ("addresses", own["addresses"]),
        ("shims", own["shims"]),
    ):
        report.add("lives", f"{what} that containerd itself has forgotten {where}", len(left), "")
    for problem in (*leaked, *lost):
        say(f"  {problem}")


def _missing(report: Report, provider: str) -> bool:
    if provider == "vsphere" and not PROGRAM.exists():
        report.missing["lives:vsphere"] = f"not run: {PROGRAM} is missing: make tools"
        return True
    if provider != "simulated":
        clouds.need_descriptions()
    return False


def _tell(report: Report, label: str, outcome: Outcome) -> None:
    report.add("lives", f"lifecycles{label}", outcome.pods, "pods")
    kinds = f"at {len(outcome.killed_at)} kinds of moments"
    report.add("lives", f"daemons killed meanwhile{label}", outcome.kills, "kills", note=kinds)
    report.add("lives", f"VMs, addresses, disks and records leaked{label}", len(outcome.leaked), "", target=0)
    report.add("lives", f"pods lost{label}", len(outcome.lost), "", target=0)
    gone = LASTING - outcome.lasted
    report.add("lives", f"pods that ran all the time, not found again{label}", gone, "", target=0)
    missed = ", ".join(outcome.missed)
    report.add(
        "lives", f"kinds of writes without a kill{label}", len(outcome.missed), "", target=0, note=missed
    )
    for problem in (*outcome.leaked, *outcome.lost):
        say(f"  {problem}")
    for moment, count in sorted(outcome.killed_at.items()):
        say(f"  {count:4} killed {moment}")
