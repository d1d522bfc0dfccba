"""Whole lives of pods under a daemon that is killed at one write to its store after the other."""

from __future__ import annotations

from typing import Any

from bench.figures import Report, say
from tests.support.lifecycles import Lifecycles

PODS = 200
WIDTH = 10
POOL = 5


async def run(reactor: Any, report: Report) -> None:
    for pool, label in ((0, ""), (POOL, f", pool of {POOL}")):
        lives = Lifecycles(reactor, PODS // 2, WIDTH, pool=pool, seed=pool + 1)
        try:
            outcome = await lives.run()
        finally:
            lives.clean()
        report.add("lives", f"lifecycles{label}", outcome.pods, "pods")
        kinds = f"at {len(outcome.killed_at)} kinds of moments"
        report.add("lives", f"daemons killed meanwhile{label}", outcome.kills, "kills", note=kinds)
        report.add("lives", f"VMs and records leaked{label}", len(outcome.leaked), "", target=0)
        report.add("lives", f"pods lost{label}", len(outcome.lost), "", target=0)
        for words in (*outcome.leaked, *outcome.lost):
            say(f"  {words}")
        for moment, count in sorted(outcome.killed_at.items()):
            say(f"  {count:4} killed {moment}")
