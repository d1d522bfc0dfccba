# SPDX-License-Identifier: Apache-2.0
"""Compare the same specs over two of kubelet's runtimes: `python -m tests.conformance.compare FILE...`.

Each FILE is the JSON of a run; if a spec ran several times with a runtime, the last run counts. It prints
Markdown: the counts with VMs (those of a mixed node, if it was run) and with containerd, and each spec that
passes with containerd but not with VMs."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

from tests.cluster.components import CONTAINERD, INFRANETES, MIXED, RUNTIMES
from tests.interop.critest_specs import FAILED, PASSED, SKIPPED, Outcome

#: The share of the specs passed by containerd that have to pass with our runtime.
SHARE = 0.97


@attrs.frozen
class Comparison:
    """Outcomes by spec: those of `ours`, and those of the other runtime, `theirs`."""

    ours: Mapping[str, Outcome]
    theirs: Mapping[str, Outcome]

    @property
    def both(self) -> list[str]:
        """The specs that ran with both runtimes and passed with the other one."""
        return sorted(spec for spec in self.ours if self._passes(self.theirs, spec))

    @property
    def lost(self) -> list[Outcome]:
        """The outcomes of those of `both` that do not pass with ours."""
        return [self.ours[spec] for spec in self.both if not self._passes(self.ours, spec)]

    @property
    def share(self) -> float:
        """The share of `both` that passes with ours; 0.0 if there are none."""
        return 1 - len(self.lost) / len(self.both) if self.both else 0.0

    @staticmethod
    def _passes(outcomes: Mapping[str, Outcome], spec: str) -> bool:
        return spec in outcomes and outcomes[spec].state == PASSED


def read(files: Sequence[Path]) -> dict[str, dict[str, Outcome]]:
    """Return outcomes by runtime and spec. :raise ValueError: a file is not the JSON of a run."""
    found: dict[str, dict[str, Outcome]] = {runtime: {} for runtime in RUNTIMES}
    for file in files:
        run = json.loads(file.read_text())
        if run.get("runtime") not in found:
            raise ValueError(f"{file} is not the JSON of a run with one of {', '.join(found)}")
        found[run["runtime"]] |= {each["spec"]: Outcome(**each) for each in run["specs"]}
    return found


def told(comparison: Comparison, names: Sequence[str]) -> list[str]:
    """Return the comparison as lines of Markdown."""
    lines = ["| kubelet's runtime | Run | Passed | Failed | Skip themselves |", "|---|---|---|---|---|"]
    for name, outcomes in zip(names, (comparison.ours, comparison.theirs), strict=True):
        counts = Counter(each.state for each in outcomes.values())
        figures = (len(outcomes), counts[PASSED], counts[FAILED], counts[SKIPPED])
        lines.append(f"| {name} | {' | '.join(map(str, figures))} |")
    passed = len(comparison.both) - len(comparison.lost)
    lines += ["", f"Of {len(comparison.both)} that {names[1]} passes {passed} pass: {comparison.share:.1%}."]
    if comparison.lost:
        lines += ["", "| Spec | |", "|---|---|"]
        lines += [f"| {each.spec} | {each.message[:200].replace('|', ' ')} |" for each in comparison.lost]
    return lines


def main(arguments: Sequence[str]) -> int:
    """Return the exit code, which is 0 if enough of the specs pass."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance.compare", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    outcomes = read(parser.parse_args(arguments).files)
    ours = MIXED if outcomes[MIXED] else INFRANETES
    comparison = Comparison(outcomes[ours], outcomes[CONTAINERD])
    print(*told(comparison, (ours, CONTAINERD)), sep="\n")
    return 0 if comparison.share >= SHARE else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
