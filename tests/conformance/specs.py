# SPDX-License-Identifier: Apache-2.0
"""Run specs of Kubernetes' end-to-end suite, each in a process of its own, several at a time."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from zlib import crc32

import attrs

from tests.cluster.paths import PROGRAMS
from tests.interop.critest_specs import FAILED, PASSED, SKIPPED, Outcome, name_of, read

SUITE = PROGRAMS / "e2e.test"
SPEC_SECONDS = 1200  # most specs wait at most ten minutes for any one thing
SLOW_SECONDS = 3000  # for a spec that waits until kubelet's back-off has reached its maximum
END_SECONDS = 180.0  # for the suite's cleanup after that
LIST_SECONDS = 300.0
_DESCRIPTION = "Kubernetes e2e suite "
_SPECIAL = re.compile(r"[][\\.+*?()|^${}]")
_QUIET = ("--ginkgo.no-color", "--ginkgo.seed=1", "--dump-logs-on-failure=false")


@attrs.frozen
class Spec:
    """One `It`; its name includes the texts of the containers around it."""

    name: str

    @property
    def alone(self) -> bool:
        """Whether it must not run beside other specs: its name has [Serial] or [Disruptive]."""
        return "[Serial]" in self.name or "[Disruptive]" in self.name

    @property
    def focus(self) -> str:
        """The Go regular expression that matches only this spec."""
        escaped = _SPECIAL.sub(r"\\\g<0>", _DESCRIPTION + self.name)
        return "^" + re.sub(" +", " +", escaped) + "$"  # spaces in Ginkgo's report can differ from the spec's

    @property
    def seconds(self) -> int:
        """The timeout of the spec."""
        return SLOW_SECONDS if "[Slow]" in self.name else SPEC_SECONDS


def listed(focus: str, skip: str = "", flags: Sequence[str] = ()) -> list[Spec]:
    """List the specs whose name matches the regular expression `focus` and not `skip`.

    :param flags: of the suite; they affect which specs there are.
    :raise RuntimeError: the suite gives no list."""
    with tempfile.TemporaryDirectory(prefix="e2e-") as directory:
        report = Path(directory, "report.json")
        command = [str(SUITE), "--ginkgo.dry-run", "--kubeconfig=/dev/null", *flags, *_QUIET]
        done = subprocess.run(
            [*command, f"--ginkgo.json-report={report}", f"--ginkgo.focus={focus or '.'}"],
            cwd=directory, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, timeout=LIST_SECONDS,
        )  # fmt: skip
        if not report.exists():
            raise RuntimeError(f"the suite lists no specs: {done.stdout[-2000:]}")
        found = [each for each in read(json.loads(report.read_text())) if each["State"] == PASSED]
    specs = [Spec(name_of(each)) for each in found]
    return [spec for spec in specs if not skip or not re.search(skip, spec.name)]


def sliced(specs: Sequence[Spec], number: int, of: int) -> list[Spec]:
    """Return part `number` (from 1) of `of` parts. Which part a spec is in does not depend on other specs."""
    if not 1 <= number <= of:
        raise ValueError(f"there is no part {number} of {of}")
    return [spec for spec in specs if crc32(spec.name.encode()) % of == number - 1]


class Runner:
    """Run specs in one cluster.

    :param command: the suite's command line in the cluster, without the flags that depend on the spec.
    :param directory: for the report and the output of each spec.
    :param tell: called with each outcome as specs end, one at a time."""

    def __init__(self, command: Sequence[str], directory: Path, tell: Callable[[Outcome], None]) -> None:
        self._command = [*command, *_QUIET, "--ginkgo.v"]
        self._directory = directory
        self._tell = tell
        self._lock = threading.Lock()
        self._count = 0

    def all(self, specs: Sequence[Spec], at_a_time: int) -> list[Outcome]:
        """Run first the specs that may run concurrently, then the rest one after the other.

        If interrupted, it starts no more specs, and leaves those that run to end with their cluster."""
        pool = ThreadPoolExecutor(at_a_time)
        try:
            outcomes = list(pool.map(self.one, [spec for spec in specs if not spec.alone]))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        return outcomes + [self.one(spec) for spec in specs if spec.alone]

    def one(self, spec: Spec) -> Outcome:
        """Run a spec, report its outcome to `tell`, and return it."""
        with self._lock:
            self._count += 1
            directory = self._directory / f"{self._count:03d}"
        directory.mkdir(parents=True)
        report, begun = directory / "report.json", time.monotonic()
        flags = [f"--ginkgo.timeout={spec.seconds}s", f"--ginkgo.focus={spec.focus}"]
        flags += [f"--ginkgo.json-report={report}"]
        with (directory / "output").open("w") as output:
            output.write(f"{spec.name}\n")
            output.flush()
            _run([*self._command, *flags], output.fileno(), spec.seconds + END_SECONDS)
        outcome = outcome_of(spec, report, time.monotonic() - begun)
        with self._lock:
            self._tell(outcome)
        return outcome


def _run(command: Sequence[str], output: int, seconds: float) -> None:
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
    ) as process:
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()  # then there will be no report


def outcome_of(spec: Spec, report: Path, seconds: float) -> Outcome:
    """Return the outcome according to Ginkgo's report."""
    try:
        (found,) = read(json.loads(report.read_text()))
    except (OSError, ValueError):
        return Outcome(spec.name, FAILED, seconds, f"the suite gave no report in {seconds:.0f} s")
    state = found["State"] if found["State"] in (PASSED, SKIPPED) else FAILED
    message = " ".join(found.get("Failure", {}).get("Message", "").split())
    return Outcome(spec.name, state, seconds, message)
