# SPDX-License-Identifier: Apache-2.0
"""Which lines each test runs, and how long it takes. Measured once for each module of tests, and kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from concurrent.futures import Executor

import attrs
import cattrs

from tests.mutants.imports import Imports
from tests.mutants.mutant import Mutant
from tests.mutants.run_tests import ROOT, Lines, Request, Result
from tests.mutants.trees import NoResults, Trees

KEPT = ROOT / "build" / "mutants"
LONGEST = 1800.0  # seconds for a module of tests


@attrs.frozen
class Measured:
    """What was measured of a module of tests.

    :ivar digest: of the module and all that it imports.
    """

    digest: str
    results: list[Result]
    lines: Lines


class Reach:
    """What was measured of some modules of tests."""

    def __init__(self, measured: Iterable[Measured]) -> None:
        measured = list(measured)
        results = [result for each in measured for result in each.results]
        self.passed = {each.test: each for each in results if each.outcome == "passed"}
        self.others = sorted(each.test for each in results if each.outcome != "passed")
        self._tests: dict[tuple[str, int], set[str]] = {}
        for each in measured:
            for file, lines in each.lines.items():
                for line, tests in lines.items():
                    self._tests.setdefault((file, line), set()).update(tests)

    def tests(self, mutant: Mutant, budget: float) -> list[Result]:
        """Return the tests that run a mutant's lines: the quickest, as many as take `budget` seconds.

        Tests of a class follow each other, since they may share what is expensive to make.
        """
        names = set().union(*(self._tests.get((mutant.module, line), set()) for line in mutant.lines))
        found = sorted((self.passed[name] for name in names & self.passed.keys()), key=_seconds)
        chosen: list[Result] = []
        for each in found:
            budget -= each.seconds
            if chosen and budget < 0:
                break
            chosen.append(each)
        classes = dict.fromkeys(_class(each) for each in chosen)
        return [each for name in classes for each in chosen if _class(each) == name]


def _seconds(result: Result) -> tuple[float, str]:
    return result.seconds, result.test


def _class(result: Result) -> str:
    return result.test.rpartition(".")[0]


def measure(
    tests: Iterable[str], imports: Imports, trees: Trees, threads: Executor, tell: Callable[[str], object]
) -> Reach:
    """Measure those modules of tests that have changed, or of which something that they import has."""

    def one(module: str) -> Measured:
        digest, kept = imports.digest(module), KEPT / f"{module}.json"
        if kept.exists():
            measured = cattrs.structure(json.loads(kept.read_text()), Measured)
            if measured.digest == digest:
                return measured
        measured = _measure(module, digest, trees)
        KEPT.mkdir(parents=True, exist_ok=True)
        new = kept.with_suffix(".new")
        new.write_text(json.dumps(cattrs.unstructure(measured)))
        new.rename(kept)
        tell(f"measured {module}: {len(measured.results)} tests")
        return measured

    return Reach(threads.map(one, tests))


def _measure(module: str, digest: str, trees: Trees) -> Measured:
    run = trees.run(Request([module], "", processor=int(LONGEST), trace=True, go_on=True), LONGEST)
    if run.end is None or not run.results:
        raise NoResults(f"{module} does not run: try `python -m tests {module}`")
    return Measured(digest, run.results, run.end.lines)
