# SPDX-License-Identifier: Apache-2.0
"""What the outcomes of critest's specs mean: which were expected, and whether a run is good."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from tests.interop.critest_specs import PASSED, Outcome

EXPECTED = Path(__file__).with_name("critest-expected.toml")
#: The runtime whose outcomes are judged.
JUDGED = "infranetes"
#: How many of critest's specs pass at the least, those by WebSocket apart.
LEAST = 100
#: What an expected failure may be for.
KINDS = {
    "vm": "can't mean anything where a pod is a virtual machine",
    "offline": "asks a registry of Kubernetes' own",
    "missing": "what it would take",
    "delegate": "is answered by the delegate for the whole node; of a daemon before one alone",
}


_KEYS = {"spec", "kind", "reason"}  # that each entry has


class BadExpectation(Exception):
    """An entry of critest-expected.toml that says too little, or names no spec."""


@attrs.frozen
class Expectation:
    """A spec that does not pass. `kind`: one of KINDS; `reason`: a sentence. `containers`: what has to run
    the containers for that, as docker; "": whatever does."""

    spec: str
    kind: str
    reason: str
    containers: str = ""


def expectations(
    path: Path = EXPECTED, containers: str = "", delegate: bool = True
) -> dict[str, Expectation]:
    """By spec.

    :param containers: what runs the containers, as docker or oci; "": leave none of them out.
    :param delegate: whether there is one.
    :raise BadExpectation: an entry is incomplete, or there twice."""
    found: dict[str, Expectation] = {}
    for entry in tomllib.loads(path.read_text()).get("expected", []):
        spec, kind, reason = (str(entry.get(key, "")).strip() for key in ("spec", "kind", "reason"))
        if not spec or not reason or kind not in KINDS or not _KEYS <= set(entry) <= {*_KEYS, "containers"}:
            raise BadExpectation(
                f"{path.name}: an entry has spec, kind (of {', '.join(KINDS)}), reason, and may have "
                f"containers: {entry}"
            )
        if spec in found:
            raise BadExpectation(f"{path.name}: {spec!r} is there twice")
        found[spec] = Expectation(spec, kind, reason, str(entry.get("containers", "")))
    return {
        spec: each
        for spec, each in found.items()
        if (not containers or each.containers in ("", containers)) and (delegate or each.kind != "delegate")
    }


@attrs.frozen
class Verdict:
    """How a run is to be seen."""

    outcomes: tuple[Outcome, ...]
    unlisted: tuple[Outcome, ...]
    passing: tuple[Outcome, ...]

    @property
    def good(self) -> bool:
        """All that is not expected to fail passed, and nothing else."""
        return bool(self.outcomes) and not self.unlisted and not self.passing


def judge(outcomes: Sequence[Outcome], expected: Mapping[str, Expectation]) -> Verdict:
    """A spec that skips itself has not passed either."""
    return Verdict(
        tuple(outcomes),
        tuple(each for each in outcomes if each.state != PASSED and each.spec not in expected),
        tuple(each for each in outcomes if each.state == PASSED and each.spec in expected),
    )


def shortfalls(runs: Mapping[str, Sequence[Outcome]]) -> list[str]:
    """What is promised of a run of the whole suite and does not hold, in words.

    :param runs: by the runtime's name; Infranetes' has to be the best."""
    passed = {
        name: sum(each.state == PASSED for each in outcomes if not by_websocket(each))
        for name, outcomes in runs.items()
    }
    ours = passed.pop(JUDGED, 0)
    said = [f"infranetes passed {ours} specs, and should pass {LEAST} or more"] if ours < LEAST else []
    return said + [
        f"infranetes passed {ours} specs, and should pass more than the {theirs} of {name}"
        for name, theirs in passed.items()
        if ours <= theirs
    ]


def differences(runs: Mapping[str, Sequence[Outcome]], direct: str, through: str) -> list[str]:
    """What a runtime's specs do not do through another one's socket as they do directly, in words.

    :param direct: the runtime's name; `through`: that of the same behind the other."""
    theirs = {each.spec: each for each in runs.get(direct, ())}
    if through in runs and not theirs:
        return [f"no spec has been run with {direct}"]
    return [
        f"{each.spec}: {theirs[each.spec].state} with {direct}, {each.state} with {through}: {each.message}"
        for each in runs.get(through, ())
        if each.spec in theirs and each.state != theirs[each.spec].state
    ]


def strangers(expected: Iterable[str], specs: Iterable[str]) -> list[str]:
    """What is expected of specs that critest does not have."""
    return sorted(set(expected) - set(specs))


def counts(outcomes: Iterable[Outcome]) -> dict[str, int]:
    """How many by state."""
    found = {"passed": 0, "failed": 0, "skipped": 0}
    for each in outcomes:
        found[each.state] += 1
    return found


def by_websocket(outcome: Outcome) -> bool:
    """Whether it is a second run of a spec, over WebSocket."""
    return outcome.spec.startswith("websocket: ")


def line(outcomes: Sequence[Outcome]) -> str:
    """The counts in words, those by WebSocket apart."""
    apart = [each for each in outcomes if by_websocket(each)]
    rest = [each for each in outcomes if each not in apart]
    said = []
    for name, group in (("", rest), ("by WebSocket ", apart)):
        if group:
            number = counts(group)
            said.append(
                f"{name}{number['passed']} of {len(group)} passed, "
                f"{number['failed']} failed, {number['skipped']} skipped"
            )
    return "; ".join(said)


def summary(verdict: Verdict, expected: Mapping[str, Expectation]) -> list[str]:
    """The run's end, for people."""
    lines = []
    for each in verdict.outcomes:
        if each.state != PASSED and each.spec in expected:
            why = expected[each.spec]
            lines.append(f"expected ({why.kind}): {each.spec}: {why.reason}")
    for each in verdict.unlisted:
        lines.append(f"{each.state.upper()}, not expected: {each.spec}\n    {each.message[:600]}")
    for each in verdict.passing:
        lines.append(f"PASSES, expected to fail: {each.spec}: take it out of {EXPECTED.name}")
    return lines


def document(
    runs: Mapping[str, Sequence[Outcome]], verdict: Verdict, missed: Sequence[str], seconds: float
) -> dict[str, Any]:
    """All of it for machines. :param runs: by the runtime's name."""
    return {
        "good": (verdict.good or JUDGED not in runs) and not missed,
        "missed": list(missed),
        "seconds": round(seconds, 1),
        "unlisted": [each.spec for each in verdict.unlisted],
        "passing": [each.spec for each in verdict.passing],
        "runtimes": {
            name: {"counts": counts(outcomes), "specs": [attrs.asdict(each) for each in outcomes]}
            for name, outcomes in runs.items()
        },
    }
