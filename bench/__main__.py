"""Takes the figures: ``python -m bench [NAME[:CHOICE]...] [--json FILE]``; without a NAME, all benches.

The table goes to standard output, progress to standard error. Missed targets do not change the exit
code: figures are looked at, not asserted. A bench whose parts are missing is named under the table; one
that breaks off as well, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import importlib
import traceback
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.task import react

from bench.figures import Missing, Report, say

# name: (module with `async def run(reactor, report)`, what it tells)
BENCHES = {
    "pods": ("bench.pods", "a pod on a cloned template until its container runs, and ExecSync (QEMU)"),
    "pool": ("bench.pool", "pods on a simulated cloud that boots for 45 s, with and without a warm pool"),
    "lives": ("bench.lives", "200 pods' lives under a daemon that is killed again and again"),
    "density": ("bench.density", "lists, memory and recovery with 1,000 simulated pods"),
    "conformance": ("bench.conformance", "critest's benchmarks beside containerd (QEMU)"),
    "streams": ("bench.streams", "exec and port-forward beside containerd, and the daemon's memory (QEMU)"),
    "rpc": ("bench.rpc", "txgrpc against grpcio"),
}
CHOICES = {"lives": ("aws", "gcp", "vsphere", "clouds")}  # of a bench, in place of what it always does
DEFAULT_JSON = Path("build/bench.json")


async def _run(reactor: Any, names: list[str], json: Path) -> None:
    report = Report()
    failed = False
    for name in names:
        bench, _, choice = name.partition(":")
        module, words = BENCHES[bench]
        say(f"{name}: {words}")
        try:
            chosen = [choice] if choice else []
            await importlib.import_module(module).run(reactor, report, *chosen)
        except Missing as missing:
            report.missing[name] = f"not run: {missing}"
        except Exception as error:
            traceback.print_exc()
            report.missing[name] = f"broke off: {type(error).__name__}: {error}"
            failed = True
    print(report.table())
    report.write(json)
    say(f"JSON: {json}")
    if failed:
        raise SystemExit(1)


def _all_names() -> list[str]:
    """Benches, and with `:` behind what of each may be chosen."""
    return [*BENCHES, *(f"{bench}:{each}" for bench, choices in CHOICES.items() for each in choices)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(_all_names()), default=[])
    parser.add_argument("--json", type=Path, default=DEFAULT_JSON, metavar="FILE")
    given = parser.parse_args()
    unknown = sorted({*given.names} - {*_all_names()})
    if unknown:
        parser.error(f"no bench is called {', '.join(unknown)}; there are {', '.join(_all_names())}")
    names = given.names or [*BENCHES]
    react(lambda reactor: Deferred.fromCoroutine(_run(reactor, names, given.json)))


if __name__ == "__main__":
    main()
