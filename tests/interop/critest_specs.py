# SPDX-License-Identifier: Apache-2.0
"""Runs critest's specs, one process each, some at a time."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs

from tests.interop.critest_runtimes import TOOLS, Runtime

CRITEST = TOOLS / "critest"
SPEC_SECONDS = 300.0
#: critest's streams go by SPDY unless asked otherwise.
WEBSOCKET = ("-websocket-exec", "-websocket-attach", "-websocket-portforward")
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
_PREFIX = "[k8s.io] "
_SUITE = "CRI validation "
_SPECIAL = re.compile(r"[][\\.+*?()|^${}]")


@attrs.frozen
class Spec:
    """One `It`. `name`: with the texts of what it is in. `alone`: nothing else may run beside it."""

    name: str
    alone: bool = False
    flags: tuple[str, ...] = ()

    @property
    def focus(self) -> str:
        """The regular expression, Go's, which only this spec matches."""
        name = self.name.removeprefix("websocket: ")
        return "^" + _SPECIAL.sub(r"\\\g<0>", _SUITE + _PREFIX + name) + "$"


@attrs.frozen
class Outcome:
    """How a spec ended. `seconds` it took; `message`: why, where it has not passed."""

    spec: str
    state: str
    seconds: float
    message: str = ""


def read(report: Any) -> list[dict[str, Any]]:
    """The specs of Ginkgo's JSON report that were meant to run."""
    return [
        each
        for suite in report
        for each in suite["SpecReports"] or []
        if each["LeafNodeType"] == "It" and not _unasked(each)
    ]


def _unasked(spec: dict[str, Any]) -> bool:
    """Left out by focus or skip: a spec that skips itself has begun."""
    return bool(spec["State"] == SKIPPED and not spec.get("Failure", {}).get("Message"))


def name_of(spec: dict[str, Any]) -> str:
    """Its texts in one line, as Ginkgo prints them, without what is the same for all."""
    return " ".join([*(spec["ContainerHierarchyTexts"] or []), spec["LeafNodeText"]]).removeprefix(_PREFIX)


def listed(focus: str = "") -> list[Spec]:
    """Every spec of critest but the benchmarks, and the streaming ones once more by WebSocket.

    :param focus: a regular expression that part of the name has to match."""
    with tempfile.TemporaryDirectory() as directory:
        done = _run(Path(directory), [str(CRITEST), "--ginkgo.dry-run", "--ginkgo.seed=1"], 60.0)
        report = Path(directory, "report.json")
        if not report.exists():
            raise RuntimeError(f"critest lists no specs: {done[-2000:]}")
        found = read(json.loads(report.read_text()))
    specs = [Spec(name_of(each), bool(each.get("IsSerial"))) for each in found if each["State"] == PASSED]
    specs += [
        attrs.evolve(spec, name=f"websocket: {spec.name}", flags=WEBSOCKET)
        for spec in specs
        if spec.name.startswith("Streaming ")
    ]
    return [spec for spec in specs if re.search(focus, spec.name)]


def _run(
    directory: Path,
    command: Sequence[str],
    seconds: float,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """critest with its report and temporary files in `directory`; what it said."""
    command = [*command, "--config", os.devnull, "--ginkgo.no-color", "--ginkgo.v"]
    command += ["--ginkgo.json-report", str(directory / "report.json")]
    try:
        done = subprocess.run(
            command,
            cwd=directory,
            env={**os.environ, "TMPDIR": str(directory), **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=seconds,
        )
    except subprocess.TimeoutExpired as error:
        said = error.stdout or b""
        return said.decode(errors="replace") if isinstance(said, bytes) else said
    return done.stdout


class Runner:
    """Runs specs against one runtime.

    :param directory: for what each critest writes; kept for those that fail.
    :param tell: given each outcome, in the order in which specs end."""

    def __init__(self, runtime: Runtime, directory: Path, tell: Callable[[Outcome], None]) -> None:
        self._runtime = runtime
        self._directory = directory
        self._tell = tell
        self._lock = threading.Lock()
        self._count = 0

    def all(self, specs: Sequence[Spec], at_a_time: int) -> list[Outcome]:
        """Those which may run beside others first, the rest one after the other."""
        with ThreadPoolExecutor(at_a_time) as pool:
            outcomes = list(pool.map(self.one, [spec for spec in specs if not spec.alone]))
        return outcomes + [self.one(spec) for spec in specs if spec.alone]

    def one(self, spec: Spec) -> Outcome:
        """Run it, tell, and answer how it ended."""
        with self._lock:
            self._count += 1
            directory = self._directory / f"{self._count:03d}"
        directory.mkdir(parents=True)
        begun = time.monotonic()
        endpoint = self._runtime.endpoint
        around, environment = self._runtime.around(spec.name)
        command = [*around, str(CRITEST), "--runtime-endpoint", endpoint, "--image-endpoint", endpoint]
        command += ["--runtime-handler", self._runtime.handler, "--ginkgo.focus", spec.focus, *spec.flags]
        said = _run(directory, command, SPEC_SECONDS, environment)
        seconds = time.monotonic() - begun
        (directory / "output").write_text(f"{spec.name}\n{said}")
        outcome = _outcome(spec, directory / "report.json", seconds)
        self._tell(outcome)
        return outcome


def _outcome(spec: Spec, report: Path, seconds: float) -> Outcome:
    try:
        (found,) = read(json.loads(report.read_text()))
    except (OSError, ValueError):
        return Outcome(spec.name, FAILED, seconds, f"critest gave no report in {seconds:.0f} s")
    state = found["State"] if found["State"] in (PASSED, SKIPPED) else FAILED
    message = " ".join(found.get("Failure", {}).get("Message", "").split())
    return Outcome(spec.name, state, seconds, message)
