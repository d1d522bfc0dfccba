# SPDX-License-Identifier: Apache-2.0
"""Run specs of Kubernetes' own end-to-end suite in a cluster on real VMs: `make e2e`.

The exit code is 0 if some specs passed, and those that failed are the ones that expected.toml names."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from infranetes_common.concurrency import replace_file
from tests.cluster.__main__ import IMAGE_DIR
from tests.cluster.case import Cluster
from tests.cluster.components import INFRANETES, NODE_ADDRESS, RUNTIMES, SSH_USER
from tests.cluster.paths import PROGRAMS, REGISTRY, ROOT
from tests.conformance import images
from tests.conformance.report import (
    EXPECTED,
    EXPECTED_OF_DRIVER,
    document,
    expectations,
    judge,
    left_out,
    strangers,
    summary,
)
from tests.conformance.specs import SUITE, Runner, Spec, listed, sliced
from tests.harness import days
from tests.interop.critest_specs import PASSED, Outcome

FOCUS = r"\[sig-network\]"
#: The specs that Kubernetes requires of every cluster and every node.
JUDGE = r"\[(?:Node)?Conformance\]"
#: The specs that it requires of a volume driver.
STORAGE = r"External.Storage"
DRIVER = Path(__file__).with_name("driver.yaml")
NAME = "e2e"
OUTPUTS = ROOT / "build" / "e2e"


def options(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument(
        "--focus", default="", metavar="REGEX", help=f"only specs that match (default {FOCUS})"
    )
    parser.add_argument("--skip", default="", metavar="REGEX", help="not those (default: see expected.toml)")
    parser.add_argument(
        "--names", default="", metavar="FILE", help="only specs of these names, in that order"
    )
    parser.add_argument(
        "--judge",
        action="store_const",
        dest="focus",
        const=JUDGE,
        help="what Kubernetes asks of every cluster and node: [Conformance] and [NodeConformance]",
    )
    parser.add_argument(
        "--slice", type=_slice, default=(1, 1), metavar="K/N", help="only the Kth of N parts of them"
    )
    parser.add_argument(
        "--runtime", choices=RUNTIMES, default=INFRANETES, help="kubelet's, to be judged (%(default)s)"
    )
    parser.add_argument("--parallel", type=int, default=2, metavar="N", help="specs at a time (%(default)s)")
    parser.add_argument("--provider", default="qemu", help="what makes the machines (%(default)s)")
    parser.add_argument("--proxy", action="store_true", help="with kube-proxy on the node")
    parser.add_argument("--nodes", type=int, default=1, help="of the cluster (%(default)s)")
    parser.add_argument("--storage", action="store_true", help="what is asked of volume drivers")
    parser.add_argument("--json", default="", metavar="FILE", help="write all outcomes there")
    parser.add_argument("--list", action="store_true", help="only list the specs")
    parser.add_argument("--image-dir", default=IMAGE_DIR, help="of guest images (%(default)s)")
    return parser.parse_args(arguments)


def _slice(words: str) -> tuple[int, int]:
    """Parse K/N. K may be `today`, which selects another part each day until all have had their turn."""
    number, _, of = words.partition("/")
    parts = int(of)
    chosen_ = days.today() % parts + 1 if number == "today" else int(number)
    if not 1 <= chosen_ <= parts:
        raise argparse.ArgumentTypeError(f"{words}: there are parts 1 to {parts}")
    return chosen_, parts


def say(words: str) -> None:
    """Print a line and flush it."""
    print(words, flush=True)


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _driver(given: argparse.Namespace) -> list[str]:
    """Return the suite's flags about our volume driver."""
    return [f"--storage.testdriver={DRIVER}"] if given.storage else []


def _ssh(given: argparse.Namespace, cluster: Cluster) -> list[str]:
    """Return the variables with which the suite logs in on the node. Storage specs restart kubelet there."""
    key = f"KUBE_SSH_KEY_PATH={cluster.paths.ssh_key}"
    return [key, f"KUBE_SSH_USER={SSH_USER}"] if given.storage else []


def _expected(given: argparse.Namespace) -> Path:
    """Return the file that lists the specs that are expected to fail."""
    return EXPECTED_OF_DRIVER if given.storage else EXPECTED


def chosen(given: argparse.Namespace) -> list[Spec]:
    """Return the specs to run."""
    focus = given.focus or ("" if given.names else STORAGE if given.storage else FOCUS)
    specs = listed(focus, given.skip or left_out(_expected(given)), _driver(given))
    if given.names:
        by_name = {spec.name: spec for spec in specs}
        specs = [by_name[name] for name in Path(given.names).read_text().splitlines() if name in by_name]
    return sliced(specs, *given.slice)


class Judge:
    """One run of specs."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.specs = chosen(given)
        self.expected = expectations(given.proxy, given.runtime, _expected(given))
        self.outcomes: list[Outcome] = []
        self.ended = False  # specs that still run when it is interrupted fail because the cluster ends
        self.begun = time.monotonic()

    def run(self) -> int:
        """Run the specs in a new cluster. Return the exit code."""
        images.make(REGISTRY, say)
        flags = ["--runtime", self.given.runtime, "--image-dir", self.given.image_dir]
        flags += ["--policies"] if self.given.runtime == INFRANETES else []
        flags += ["--provider", self.given.provider, "--nodes", str(self.given.nodes)]
        flags += ["--proxy"] if self.given.proxy else []
        flags += ["--storage", "--ssh"] if self.given.storage else []
        cluster = Cluster(NAME, *flags)
        shutil.rmtree(OUTPUTS, ignore_errors=True)
        try:
            cluster.start().wait_until_ready()
            say(f"the cluster is ready after {time.monotonic() - self.begun:.0f} s; {len(self.specs)} specs")
            Runner(self.command(cluster), OUTPUTS, self.tell).all(self.specs, self.given.parallel)
        finally:
            self.ended = True
            cluster.stop()
        return self.told()

    def command(self, cluster: Cluster) -> list[str]:
        """Return the suite's command line, which runs where the node is."""
        place = cluster.paths.place
        return [
            *(str(cluster.paths.inside), "env", f"TMPDIR={place / 'tmp'}", "--unset=HTTPS_PROXY"),
            *("--unset=https_proxy", "--unset=HTTP_PROXY", "--unset=http_proxy"),
            *_ssh(self.given, cluster),
            str(SUITE),
            *(f"--kubeconfig={place / 'pki' / 'admin.conf'}", f"--host=https://{NODE_ADDRESS}:6443"),
            *(
                f"--kubectl-path={PROGRAMS / 'kubectl'}",
                f"--num-nodes={self.given.nodes}",
                "--disable-log-dump",
            ),
            *_driver(self.given),
        ]

    def tell(self, outcome: Outcome) -> None:
        """Print a line per spec, and why it did not pass. The JSON is written too: a run takes hours."""
        if self.ended:
            return
        self.outcomes.append(outcome)
        self.keep()
        at = f"{len(self.outcomes):3d}/{len(self.specs)}"
        say(f"{at} {outcome.state:7s} {outcome.seconds:6.1f} s  {outcome.spec}")
        if outcome.state != PASSED:
            say(f"            {outcome.message[:300]}")

    def keep(self) -> None:
        """Write the JSON of the specs that have ended so far."""
        if self.given.json:
            seconds = time.monotonic() - self.begun
            found = document(judge(self.outcomes, self.expected), self.expected, seconds)
            text = json.dumps({"runtime": self.given.runtime, **found}, indent=1)
            replace_file(Path(self.given.json), text, 0o644, durable=False)

    def told(self) -> int:
        """Print a summary. Return the exit code."""
        seconds = time.monotonic() - self.begun
        verdict = judge(self.outcomes, self.expected)
        print(*summary(verdict, self.expected), sep="\n")
        print(f"{verdict.line}; {seconds:.0f} s\ne2e: {'good' if verdict.good else 'NOT GOOD'}")
        return 0 if verdict.good else 1


def main(arguments: Sequence[str]) -> int:
    """Run the program. Return its exit code."""
    given = options(arguments)
    if given.list:
        print(*(spec.name for spec in chosen(given)), sep="\n")
        return 0
    if os.geteuid():
        say("A cluster needs root: sudo make e2e")
        return 1
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)
    judge_ = Judge(given)
    if unknown := strangers(judge_.expected, [each.name for each in listed("", flags=_driver(given))]):
        print(f"{_expected(given).name} names specs that there are not:", *unknown, sep="\n    ")
        return 1
    return judge_.run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
