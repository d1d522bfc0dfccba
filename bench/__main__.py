# SPDX-License-Identifier: Apache-2.0
"""Take the figures: ``python -m bench [NAME[:CHOICE]...] [--json FILE]``; without a NAME, all benches.

The table goes to standard output, progress to standard error. A missed target does not change the exit code.
Under the table are benches that could not run for want of something, and those that failed, which makes the
exit code 1.
"""

from __future__ import annotations

import argparse
import importlib
import traceback
from pathlib import Path

from twisted.internet.task import react

from bench.figures import Missing, Report, say
from infranetes_common.concurrency import start
from infranetes_common.reactors import IReactor

# name: (module with `async def run(reactor, report)`, what it measures)
BENCHES = {
    "pods": ("bench.pods", "a pod on a cloned template until its container runs, and ExecSync (QEMU)"),
    "images": ("bench.images", "containers by the size of their image, which comes as layers"),
    "mounts": ("bench.mounts", "a configmap's change until a running container has read it (QEMU)"),
    "pool": ("bench.pool", "pods on a simulated cloud that boots for 45 s, with and without a warm pool"),
    "lives": ("bench.lives", "a soak test: 200 pods while the daemon is killed again and again"),
    "density": ("bench.density", "lists, memory and recovery with 1,000 simulated pods"),
    "conformance": ("bench.conformance", "critest's benchmarks beside containerd (QEMU)"),
    "streams": ("bench.streams", "exec and port-forward beside containerd, and the daemon's memory (QEMU)"),
    "rpc": ("bench.rpc", "txgrpc against grpcio"),
}
# Variants of a bench, chosen in place of what it does by default.
CHOICES = {
    "images": ("qemu",),
    "lives": ("aws", "gcp", "vsphere", "clouds", "troubles"),
}
DEFAULT_JSON = Path("build/bench.json")


async def _run(reactor: IReactor, names: list[str], json: Path) -> None:
    report = Report()
    failed = False
    for name in names:
        bench, _, choice = name.partition(":")
        module, description = BENCHES[bench]
        say(f"{name}: {description}")
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
    """The names of all benches and their variants."""
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
    react(lambda reactor: start(_run(reactor, names, given.json)))


if __name__ == "__main__":
    main()
