# SPDX-License-Identifier: Apache-2.0
"""Run the benches: ``python -m bench [NAME[:CHOICE]...] [--json FILE]``; without a NAME, all of them.

The last runs are kept in FILE-history.json, beside FILE.json, and drawn as FILE/*.svg.
``python -m bench --draw FILE`` draws such a file without running anything, and ``--needs NAME...`` prints
what the Makefile has to make for these benches.

The table goes to standard output, progress to standard error. A missed target does not change the exit code.
Listed below the table are the benches that could not run because something is missing, and those that
failed; a failure makes the exit code 1. As root, the benches run in namespaces of their own.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from twisted.internet.task import react

from bench import history, isolation, needs, plots
from bench.figures import Missing, Report, say
from bench.setup import Setup
from infranetes.providers.qemu.settings import ACCELERATORS
from infranetes_common.concurrency import start
from infranetes_common.reactors import IReactor

# name: (module with `async def run(reactor, report)`, what it measures)
# A module may have `prepare()`, which is called first and, unlike the benches, may use the network.
BENCHES = {
    "waits": ("bench.waits", "what a user waits for, by the size of the image, beside containerd (QEMU)"),
    "native": ("bench.native", "what a pod costs where nothing is emulated, beside containerd"),
    "floor": ("bench.floor", "a pod beside the least that a clone and a container can cost (QEMU)"),
    "crowd": ("bench.crowd", "two, ten and thirty pods at once, by the size of the image (QEMU)"),
    "ready": ("bench.ready", "a pod until kubelet says that it is ready, beside containerd (QEMU)"),
    "blobs": ("bench.blobs", "a layer as pulled until it is the file system that VMs mount"),
    "images": ("bench.images", "containers by the size of their image, on a simulated cloud"),
    "pods": ("bench.pods", "pods with Docker until their containers run, and ExecSync (QEMU)"),
    "mounts": ("bench.mounts", "a configmap's change until a running container has read it (QEMU)"),
    "fio": ("bench.fio", "what a volume carries, beside the same file on the node (QEMU)"),
    "attach": ("bench.attach", "a volume from its attachment until the pod's VM has it mounted (QEMU)"),
    "memory": ("bench.memory", "what idle pods take of the node's memory, and the guest of its own (QEMU)"),
    "machines": ("bench.machines", "pods whose image is a VM of anybody's, beside plain QEMU (QEMU)"),
    "pool": ("bench.pool", "pods on a simulated cloud that boots for 45 s, with and without a warm pool"),
    "lives": ("bench.lives", "a soak test: 200 pods while the daemon is killed again and again"),
    "volumes": ("bench.volumes", "100 volumes at once on simulated clouds; a soak test of 200"),
    "launches": ("bench.launches", "100 VMs at once by the cloud's own limits, and the calls of their lives"),
    "calls": ("bench.calls", "calls to simulated clouds: for a pod's life, and for an hour at rest"),
    "quota": (
        "bench.quota",
        "what 1,000 nodes use of an account's quotas, and how soon VMs' ends are noticed",
    ),
    "density": ("bench.density", "lists, memory and recovery with 1,000 simulated pods"),
    "conformance": ("bench.conformance", "critest's benchmarks beside containerd (QEMU)"),
    "streams": ("bench.streams", "exec and port-forward beside containerd, and the daemon's memory (QEMU)"),
    "services": ("bench.services", "the rules of 10,000 Services in a VM, and connections through them"),
    "fleet": ("bench.fleet", "the same rules in 1, 100 and 1,000 VMs of one daemon, and 10 changes a second"),
    "proxies": ("bench.proxies", "the same 10,000 Services in a VM's rules and in kube-proxy's"),
    "hop": ("bench.hop", "calls for containerd's pods, direct and through the daemon"),
    "rpc": ("bench.rpc", "txgrpc against grpcio"),
    "libraries": ("bench.libraries", "libraries that are not used, beside what is in their place"),
}
_CLOUDS = ("aws", "azure", "gcp", "openstack", "vsphere")
# Variants of a bench, each run instead of what the bench does by default.
CHOICES = {
    "waits": ("pool",),
    "machines": ("ways",),
    "memory": ("docker",),
    "lives": (
        *_CLOUDS,
        "clouds",
        "troubles",
        *(f"troubles-{each}" for each in _CLOUDS),
        "mixed",
    ),
    "volumes": ("aws", "azure", "gcp", "openstack", "vsphere"),
    "launches": ("azure", "vsphere"),
    "libraries": ("emulated",),
    "density": ("many",),
}
DEFAULT_JSON = Path("build/bench.json")


async def run_benches(reactor: IReactor, names: list[str], setup: Setup, json: Path) -> None:
    """Run the benches, print their figures, and keep and draw them beside `json`."""
    report = Report(setup)
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
    try:
        runs = history.add(history.beside(json), report.document())
        _draw(runs, json.with_suffix(""))
    except (Missing, ValueError) as error:
        say(str(error))
    if failed:
        raise SystemExit(1)


def _draw(runs: Sequence[history.Document], directory: Path) -> None:
    titles = {name: description for name, (_, description) in BENCHES.items()}
    for path in plots.draw(plots.plots(runs, titles), directory):
        say(f"plot: {path}")


def _all_names() -> list[str]:
    """Return the names of all benches and their variants."""
    return [*BENCHES, *(f"{bench}:{each}" for bench, choices in CHOICES.items() for each in choices)]


def _prepare(names: Sequence[str]) -> None:
    """Prepare the benches, perhaps with the network. One that can't be prepared reports that when it runs."""
    for module in dict.fromkeys(BENCHES[name.partition(":")[0]][0] for name in names):
        prepare = getattr(importlib.import_module(module), "prepare", None)
        try:
            if prepare is not None:
                prepare()
        except Missing as missing:
            say(str(missing))


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line. Exits if it is wrong."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(_all_names()), default=[])
    parser.add_argument("--json", type=Path, default=DEFAULT_JSON, metavar="FILE")
    parser.add_argument("--accelerator", choices=ACCELERATORS, default="auto", help="of QEMU (%(default)s)")
    parser.add_argument("--image-dir", type=Path, metavar="DIRECTORY", help="of the guest image")
    parser.add_argument(
        "--draw", type=Path, metavar="FILE", help="figures that were taken before: draw them alone"
    )
    parser.add_argument(
        "--needs", action="store_true", help="print the Makefile's targets that the benches need alone"
    )
    given = parser.parse_args(arguments)
    unknown = sorted({*given.names} - {*_all_names()})
    if unknown:
        parser.error(f"no bench is called {', '.join(unknown)}; there are {', '.join(_all_names())}")
    given.names = given.names or [*BENCHES]
    return given


def main(arguments: Sequence[str]) -> None:
    given = parsed(arguments)
    if given.needs:
        print(*needs.needed(given.names))
        return
    if given.draw is not None:
        try:
            _draw(history.read(given.draw), given.draw.with_suffix(""))
        except (Missing, OSError, ValueError) as error:
            raise SystemExit(f"python -m bench: {error}") from error
        return
    if not isolation.inside():
        _prepare(given.names)
        isolation.go_inside(arguments)
    isolation.settle_in()
    setup = Setup(given.accelerator, given.image_dir)
    react(lambda reactor: start(run_benches(reactor, given.names, setup, given.json)))


if __name__ == "__main__":
    main(sys.argv[1:])
