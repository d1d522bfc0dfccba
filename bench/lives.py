"""Whole lives of pods under a daemon that is killed at one write to its store after the other.

On simulated VMs; with `lives:aws`, `lives:gcp` or `lives:vsphere` on a simulated cloud over HTTP, whose VMs
have real agents, with `lives:clouds` on all three. Each takes half an hour: without a name they are left out.
"""

from __future__ import annotations

from typing import Any

from bench.figures import Report, say
from tests.support.clouds.vcsim import PROGRAM
from tests.support.grounds import GROUNDS
from tests.support.lifecycles import Lifecycles, Outcome

CLOUDS = ("aws", "gcp", "vsphere")
PODS = 200
WIDTH = 10
POOL = 5


async def run(reactor: Any, report: Report, choice: str = "simulated") -> None:
    for ground in CLOUDS if choice == "clouds" else (choice,):
        if ground == "vsphere" and not PROGRAM.exists():
            report.missing["lives:vsphere"] = f"not run: {PROGRAM} is missing: make tools"
            continue
        where = "" if ground == "simulated" else f", {ground}"
        for pool, label in ((0, where), (POOL, f"{where}, pool of {POOL}")):
            lives = Lifecycles(reactor, PODS // 2, WIDTH, pool=pool, seed=pool + 1, ground=GROUNDS[ground])
            try:
                _tell(report, label, await lives.run())
            finally:
                lives.clean()


def _tell(report: Report, label: str, outcome: Outcome) -> None:
    report.add("lives", f"lifecycles{label}", outcome.pods, "pods")
    kinds = f"at {len(outcome.killed_at)} kinds of moments"
    report.add("lives", f"daemons killed meanwhile{label}", outcome.kills, "kills", note=kinds)
    report.add("lives", f"VMs, addresses, disks and records leaked{label}", len(outcome.leaked), "", target=0)
    report.add("lives", f"pods lost{label}", len(outcome.lost), "", target=0)
    for words in (*outcome.leaked, *outcome.lost):
        say(f"  {words}")
    for moment, count in sorted(outcome.killed_at.items()):
        say(f"  {count:4} killed {moment}")
