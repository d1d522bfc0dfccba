# SPDX-License-Identifier: Apache-2.0
"""Kubernetes' conformance suite against the daemon on real VMs: `make conformance`.

Starts a registry with stand-ins for the images that critest pulls, then the daemon, and runs each spec of
critest, once. The exit code is 0 if all passed but those of critest-expected.toml, and those failed; if that
makes a hundred or more, and more than containerd's beside it."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import attrs

from infranetes.guest.image import current
from infranetes.providers.qemu.settings import ACCELERATORS
from tests.infranetes.daemon.case import ROOT
from tests.interop.critest_benchmark import NoFigures, measure
from tests.interop.critest_images import fetch, images
from tests.interop.critest_report import (
    JUDGED,
    differences,
    document,
    expectations,
    judge,
    line,
    shortfalls,
    strangers,
    summary,
)
from tests.interop.critest_runtimes import (
    Before,
    Containerd,
    Infranetes,
    NotReady,
    Runtime,
    Through,
    removed,
)
from tests.interop.critest_specs import PASSED, Outcome, Runner, listed
from tests.interop.critest_streams import SECONDS as STREAM_SECONDS
from tests.interop.critest_streams import Figures
from tests.interop.critest_streams import measure as measure_streams
from tests.support.registry import Registry

CACHE = ROOT / "build" / "conformance"
TEMPLATES = "/var/lib/infranetes/test-templates"
# Whatever a spec leaves behind (mounts, shared memory, listeners, bridges, processes) ends with these.
OWN = ("unshare", "--mount", "--ipc", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
#: What is judged of a node that has a delegate: its own pods, VMs beside it, or both.
DELEGATED = ("theirs", "ours", "all")


def containers_by(image_dir: Path) -> str:
    """What runs containers in pods that choose nothing."""
    return next(iter(current(image_dir).providers), "docker")


INSIDE = "CRITEST_INSIDE"


def options(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.interop.critest", description=__doc__)
    parser.add_argument("--focus", default="", metavar="REGEX", help="only specs whose name matches")
    parser.add_argument("--beside", choices=["containerd"], help="run them against this one too")
    parser.add_argument(
        "--delegate",
        choices=DELEGATED,
        help="run them against containerd, and that through the daemon (theirs), against the VMs of a daemon "
        "before a containerd (ours), or against all of these",
    )
    parser.add_argument("--only", action="store_true", help="run them against that one alone; judge nothing")
    parser.add_argument("--benchmark", type=int, default=0, metavar="N", help="N samples of each benchmark")
    parser.add_argument("--streams", type=int, default=0, metavar="MIB", help="measure streams of that size")
    parser.add_argument("--parallel", type=int, default=2, metavar="N", help="specs at a time (%(default)s)")
    parser.add_argument("--json", default="", metavar="FILE", help="write all outcomes there")
    parser.add_argument("--keep", action="store_true", help="keep the directory with logs and outputs")
    parser.add_argument("--list", action="store_true", help="only list the specs")
    parser.add_argument("--image-dir", default="/var/lib/infranetes/guest", help="of guest images")
    parser.add_argument("--template-dir", default=TEMPLATES, help="of QEMU's templates")
    parser.add_argument("--accelerator", choices=ACCELERATORS, default="auto", help="of QEMU (%(default)s)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """The whole program."""
    given = options(arguments)
    if given.list:
        print(*(spec.name for spec in listed(given.focus)), sep="\n")
        return 0
    if not os.environ.get(INSIDE):
        fetch(CACHE / "images")  # inside there is no network
        command = [*OWN, sys.executable, "-m", "tests.interop.critest", *arguments]
        os.execvpe(command[0], command, {**os.environ, INSIDE: "1"})  # noqa: S606
    reap()
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGINT, _end)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    root = Path(tempfile.mkdtemp(prefix="critest-", dir="/var/tmp"))  # short, for sockets
    root.chmod(0o755)  # QEMU runs as a user of its own
    tempfile.tempdir = str(root)
    try:
        return Judge(given, root).run()
    except (NotReady, NoFigures) as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        if given.keep:
            print(f"kept: {root}")
        else:
            removed(root)


def say(words: str) -> None:
    """Tell, at once."""
    print(words, flush=True)


def reap() -> None:
    """Go on in a child: the first process of a namespace has to wait for whatever is orphaned in it."""
    child = os.fork()
    while child:
        ended, status = os.wait()
        if ended == child:
            os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


class Judge:
    """One run of the suite, of one runtime or two."""

    def __init__(self, given: argparse.Namespace, root: Path) -> None:
        self.given = given
        self.root = root
        self.done = 0
        self.begun = time.monotonic()
        self.specs = listed(given.focus)
        if given.delegate:  # those of images share some names, and are compared
            self.specs = [
                attrs.evolve(each, alone=each.alone or each.name.startswith("Image Manager "))
                for each in self.specs
            ]
        containers = "" if given.only else containers_by(Path(given.image_dir))
        self.expected = expectations(containers=containers, delegate=bool(given.delegate))

    def run(self) -> int:
        """The exit code."""
        if not self.given.focus and (unknown := strangers(self.expected, [each.name for each in self.specs])):
            print("critest-expected.toml names specs that there are not:", *unknown, sep="\n    ")
            return 1
        with Registry() as registry:
            for name, tag, image in images(CACHE / "images"):
                registry.push(name, tag, image)
            if self.given.benchmark:
                return self.measured(registry)
            if self.given.streams:
                return self.streamed(registry)
            return self.told({each.name: self.against(each, registry) for each in self.runtimes()})

    def runtimes(self) -> list[Runtime]:
        """Those that are asked for, Infranetes first."""
        found: list[Runtime] = []
        given = self.given
        table = {
            "image_dir": given.image_dir,
            "template_dir": given.template_dir,
            "accelerator": given.accelerator,
        }
        if given.delegate:
            if given.delegate != "theirs":
                found.append(Before(self.root / "b", table))
            if given.delegate != "ours":
                found += [Containerd(self.root / "c"), Through(self.root / "t")]
            return found
        if not given.only:
            found.append(Infranetes(self.root / "i", table))
        if self.given.beside or self.given.only:
            found.append(Containerd(self.root / "c"))
        return found

    def measured(self, registry: Registry) -> int:
        """Benchmarks in place of specs; the exit code."""
        figures: dict[str, dict[str, list[float]]] = {}
        for runtime in self.runtimes():
            with contextlib.ExitStack() as stack:
                stack.callback(runtime.end)
                runtime.start(registry)
                samples = measure(runtime, self.root / f"{runtime.name}-figures", self.given.benchmark)
            figures[runtime.name] = samples
            for name, taken in samples.items():
                say(f"{runtime.name} {name}: median {statistics.median(taken) * 1000:.1f} ms of {len(taken)}")
        if self.given.json:
            Path(self.given.json).write_text(json.dumps(figures))
        return 0

    def streamed(self, registry: Registry) -> int:
        """Streams in place of specs; the exit code."""
        figures: dict[str, Figures] = {}
        left = STREAM_SECONDS
        for runtime in self.runtimes():
            with contextlib.ExitStack() as stack:
                stack.callback(runtime.end)
                runtime.start(registry)
                begun = time.monotonic()
                directory = self.root / f"{runtime.name}-streams"
                taken = measure_streams(runtime, directory, self.given.streams, begun + left)
                left -= time.monotonic() - begun
            figures[runtime.name] = taken
            for name, rate in taken.rates.items():
                say(f"{runtime.name} {name}: {rate:.1f} MB/s")
            before, peak = taken.before_mib, taken.peak_mib
            say(f"{runtime.name} resident: {before:.0f} MiB before, {peak:.0f} MiB at most")
        if self.given.json:
            found = {name: attrs.asdict(taken) for name, taken in figures.items()}
            Path(self.given.json).write_text(json.dumps(found))
        return 0

    def against(self, runtime: Runtime, registry: Registry) -> list[Outcome]:
        """Every spec against that runtime."""
        self.done = 0
        begun = time.monotonic()
        with contextlib.ExitStack() as stack:
            stack.callback(runtime.end)
            runtime.start(registry)
            say(f"{runtime.name} is ready after {time.monotonic() - begun:.0f} s")
            # Some specs give paths below it to a shell.
            runner = Runner(runtime, self.root / runtime.name.replace(" ", "-"), self.tell)
            outcomes = runner.all(self.specs, self.given.parallel)
        found = line(outcomes)
        say(f"{runtime.name}: {found}; {time.monotonic() - begun:.0f} s")
        return outcomes

    def tell(self, outcome: Outcome) -> None:
        """One line per spec, and why where it has not passed."""
        self.done += 1
        at = f"{self.done:3d}/{len(self.specs)}"
        say(f"{at} {outcome.state:7s} {outcome.seconds:6.1f} s  {outcome.spec}")
        if outcome.state != PASSED:
            say(f"            {outcome.message[:300]}")

    def told(self, runs: dict[str, list[Outcome]]) -> int:
        """Prints how it went, writes the JSON; the exit code."""
        seconds = time.monotonic() - self.begun
        verdict = judge(runs.get(JUDGED, []), self.expected)
        missed = [] if self.given.focus or JUDGED not in runs else shortfalls(runs)
        missed += differences(runs, Containerd.name, Through.name)
        if self.given.json:
            Path(self.given.json).write_text(json.dumps(document(runs, verdict, missed, seconds), indent=1))
        if self.given.only:
            return 0
        print(*summary(verdict, self.expected), sep="\n")
        for name, outcomes in runs.items():
            print(f"{name}: {line(outcomes)}")
        print(*missed, sep="\n", end="\n" if missed else "")
        good = (verdict.good or JUDGED not in runs) and not missed
        print(f"conformance: {'good' if good else 'NOT GOOD'}, {seconds:.0f} s")
        return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
