# SPDX-License-Identifier: Apache-2.0
"""What the outcomes of the suite's specs mean: which failures were expected, and whether a run is good."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from tests.cluster.components import RUNTIMES
from tests.interop.critest_specs import FAILED, PASSED, SKIPPED, Outcome

EXPECTED = Path(__file__).with_name("expected.toml")
#: The expectations for the specs of volume drivers.
EXPECTED_OF_DRIVER = Path(__file__).with_name("expected-storage.toml")
#: The reasons for which a failure may be expected.
KINDS = {
    "vm": "can't mean anything where a pod is a virtual machine",
    "cluster": "asks something of the cluster that `make cluster` does not have",
    "image": "asks something of its image that the stand-in does not have",
    "missing": "what it would take",
}
_KEYS = {"spec", "kind", "reason"}  # that each entry must have
_PROXY, _RUNTIMES = "proxy", "runtimes"


class BadExpectation(Exception):
    """An entry of expected.toml that says too little."""


@attrs.frozen
class Expectation:
    """A spec that fails. `kind`: one of KINDS; `reason`: a sentence. `proxy`: whether the node has to run
    kube-proxy for that; None: it fails either way. `runtimes`: those with which it fails; empty: all."""

    spec: str
    kind: str
    reason: str
    proxy: bool | None = None
    runtimes: tuple[str, ...] = ()

    def holds(self, proxy: bool, runtime: str) -> bool:
        """Return whether it is expected to fail in such a cluster."""
        return self.proxy in (None, proxy) and (not self.runtimes or runtime in self.runtimes)


def expectations(proxy: bool, runtime: str, path: Path = EXPECTED) -> dict[str, Expectation]:
    """Return the expectations that hold in such a cluster, by spec.

    :param proxy: whether the node runs kube-proxy. :param runtime: kubelet's.
    :raise BadExpectation: an entry is incomplete, or a spec has two."""
    found: dict[str, Expectation] = {}
    for entry in tomllib.loads(path.read_text()).get("expected", []):
        spec, kind, reason = (str(entry.get(key, "")).strip() for key in ("spec", "kind", "reason"))
        runtimes = tuple(entry.get(_RUNTIMES, ()))
        complete = spec and reason and kind in KINDS and set(runtimes) <= set(RUNTIMES)
        if not complete or not _KEYS <= set(entry) <= {*_KEYS, _PROXY, _RUNTIMES}:
            raise BadExpectation(
                f"{path.name}: an entry has spec, kind (of {', '.join(KINDS)}), reason, and may have "
                f"{_PROXY} and {_RUNTIMES} (of {', '.join(RUNTIMES)}): {entry}"
            )
        if spec in found:
            raise BadExpectation(f"{path.name}: {spec!r} is there twice")
        found[spec] = Expectation(spec, kind, reason, entry.get(_PROXY), runtimes)
    return {spec: each for spec, each in found.items() if each.holds(proxy, runtime)}


def left_out(path: Path = EXPECTED) -> str:
    """Return the regular expression of the specs of expected.toml that are run only on request."""
    entries = tomllib.loads(path.read_text()).get("left_out", [])
    if not all(set(entry) == {"match", "reason"} and entry["reason"] for entry in entries):
        raise BadExpectation(f"{path.name}: what is left out has match and reason")
    return "|".join(f"(?:{entry['match']})" for entry in entries)


@attrs.frozen
class Verdict:
    """The result of a run.

    :ivar failed: unexpectedly. :ivar passing: although expected to fail. :ivar skipped: by themselves."""

    outcomes: tuple[Outcome, ...]
    failed: tuple[Outcome, ...]
    expected: tuple[Outcome, ...]
    passing: tuple[Outcome, ...]
    skipped: tuple[Outcome, ...]

    @property
    def good(self) -> bool:
        """Whether some specs passed, and all others failed as expected or skipped themselves."""
        passed = any(each.state == PASSED for each in self.outcomes)
        return passed and not self.failed and not self.passing

    @property
    def line(self) -> str:
        """The counts in words."""
        passed = sum(each.state == PASSED for each in self.outcomes)
        return (
            f"{passed} of {len(self.outcomes)} passed, {len(self.failed)} failed, "
            f"{len(self.expected)} failed as expected, {len(self.skipped)} skipped themselves"
        )


def judge(outcomes: Sequence[Outcome], expected: Mapping[str, Expectation]) -> Verdict:
    """Sort the outcomes into a verdict."""
    return Verdict(
        tuple(outcomes),
        tuple(each for each in outcomes if each.state == FAILED and each.spec not in expected),
        tuple(each for each in outcomes if each.state == FAILED and each.spec in expected),
        tuple(each for each in outcomes if each.state == PASSED and each.spec in expected),
        tuple(each for each in outcomes if each.state == SKIPPED),
    )


def strangers(expected: Iterable[str], specs: Iterable[str]) -> list[str]:
    """Return the expected failures of which the suite has no spec."""
    return sorted(set(expected) - set(specs))


def summary(verdict: Verdict, expected: Mapping[str, Expectation]) -> list[str]:
    """Return the lines with which a run ends."""
    lines = []
    for reason, number in Counter(each.message for each in verdict.skipped).most_common():
        lines.append(f"skipped themselves, {number}: {reason[:200]}")
    for each in verdict.expected:
        why = expected[each.spec]
        lines.append(f"expected ({why.kind}): {each.spec}: {why.reason}")
    for each in verdict.failed:
        lines.append(f"FAILED, not expected: {each.spec}\n    {each.message[:600]}")
    for each in verdict.passing:
        lines.append(f"PASSES, expected to fail: {each.spec}: take it out of what is expected")
    return lines


def document(verdict: Verdict, expected: Mapping[str, Expectation], seconds: float) -> dict[str, Any]:
    """Return the whole result for JSON."""
    return {
        "good": verdict.good,
        "seconds": round(seconds, 1),
        "counts": dict(Counter(each.state for each in verdict.outcomes)),
        "failed": [each.spec for each in verdict.failed],
        "expected": {each.spec: expected[each.spec].reason for each in verdict.expected},
        "passing": [each.spec for each in verdict.passing],
        "specs": [attrs.asdict(each) for each in verdict.outcomes],
    }
