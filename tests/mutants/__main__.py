# SPDX-License-Identifier: Apache-2.0
"""Put plausible bugs into modules and show which of them no test notices.

    python -m tests.mutants [--sample N] [--seed S] MODULE...

A MODULE is the path or the dotted name of a module or package of the product. Each mutant has one bug, and
is run with the tests that run its lines: those of the package that mirrors the module's, and with --importing
also others that import it. A mutant that makes a test fail, or hang, is killed; the others are survivors.
Mutants are run in copies of the repository; as root, each in namespaces of its own.

Exit code: 0: at most --most percent survive. 1: more do. 2: the tests can't be run, or nothing was asked for.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs

from tests.harness import stalls
from tests.mutants import equivalents
from tests.mutants.imports import Imports
from tests.mutants.mutant import Mutant, mutants
from tests.mutants.reach import measure
from tests.mutants.run_tests import ROOT, Request, Result
from tests.mutants.trees import NoResults, Trees

# How much longer than without the mutant, on a machine that may be busier now.
SLOWER = 5
LEAST_SECONDS = 5.0


@attrs.frozen
class Verdict:
    """What became of a mutant.

    :ivar killed_by: the test that failed, or how the process ended; None: it survived.
    :ivar tests: how many tests run its lines, within the budget.
    """

    mutant: Mutant
    killed_by: str | None
    tests: int

    @property
    def word(self) -> str:
        """How it ended, in a word."""
        if self.killed_by:
            return "killed"
        return "survived" if self.tests else "no test"


def options(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("modules", nargs="+", metavar="MODULE", help="where to put bugs")
    parser.add_argument("--sample", type=int, metavar="N", help="take only N of a MODULE's mutants")
    parser.add_argument("--seed", default="1", metavar="S", help="which N these are (default: %(default)s)")
    parser.add_argument("--tests", action="append", metavar="NAME", help="modules of tests to run instead")
    parser.add_argument(
        "--importing", action="store_true", help="also run other tests that import the modules"
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=20,
        metavar="SECONDS",
        help="run only the quickest tests of a mutant, which take so long (default: %(default)s)",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=os.cpu_count() or 1,
        metavar="N",
        help="mutants to run side by side (default: one for each processor)",
    )
    parser.add_argument(
        "--most", type=float, default=15, metavar="PERCENT", help="survivors allowed (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what became of each mutant")
    parser.add_argument("--list", action="store_true", help="show the mutants, run nothing")
    return parser.parse_args(arguments)


def dotted(name: str) -> str:
    """Turn a path into the dotted name of the module or package."""
    path = Path(name)
    if "/" in name or path.suffix == ".py":
        return ".".join(path.resolve().relative_to(ROOT).with_suffix("").parts)
    return name


def sample(found: Iterable[Mutant], number: int | None, seed: str) -> list[Mutant]:
    """Choose some mutants by their texts, so that another change does not change the choice."""
    counts: Counter[str] = Counter()

    def order(mutant: Mutant) -> str:
        words = [seed, mutant.module, mutant.function, mutant.operator, mutant.before, mutant.after]
        key = "\0".join(words)
        counts[key] += 1  # the same text may be there twice
        return hashlib.sha256(f"{key}\0{counts[key]}".encode()).hexdigest()

    return sorted(sorted(found, key=order)[:number], key=lambda each: (each.module, each.line))


@attrs.frozen
class Trial:
    """Runs mutants' tests.

    :ivar loaded: the modules of tests that all of these are in.
    """

    trees: Trees
    loaded: Sequence[str]

    def failing(self, tests: Sequence[Result]) -> set[str]:
        """Return which of these tests fail without a mutant, where they run as mutants' tests do."""
        run = self.trees.run_loaded(_request(tests, go_on=True), 60 + SLOWER * _seconds(tests), self.loaded)
        return {each.test for each in tests} - {each.test for each in run.results if each.outcome == "passed"}

    def of(self, mutant: Mutant, tests: Sequence[Result]) -> Verdict:
        """Run a mutant's tests."""
        if not tests:
            return Verdict(mutant, None, 0)
        seconds = 60 + SLOWER * _seconds(tests)
        run = self.trees.run_mutant(mutant, _request(tests), seconds, self.loaded)
        failed = [each.test for each in run.results if each.outcome == "failed"]
        if failed or (run.end and run.end.failed):
            return Verdict(mutant, (failed or run.end.failed)[0], len(tests))
        if run.end is None:
            last = run.results[-1].test if run.results else "the start"
            return Verdict(mutant, f"no end after {last}", len(tests))
        return Verdict(mutant, None, len(tests))


def _seconds(tests: Iterable[Result]) -> float:
    return sum(each.seconds for each in tests)


def _request(tests: Sequence[Result], go_on: bool = False) -> Request:
    return Request(
        tests=[each.test for each in tests],
        results="",
        processor=int(LEAST_SECONDS + SLOWER * sum(each.processor for each in tests)),
        limits={each.test: 2 * LEAST_SECONDS + SLOWER * each.seconds for each in tests},
        go_on=go_on,
    )


def as_json(verdict: Verdict) -> dict[str, object]:
    """Return a verdict in a form for JSON."""
    mutant = attrs.asdict(verdict.mutant, filter=attrs.filters.exclude("text", "lines"))
    return {
        **mutant,
        "line": verdict.mutant.line,
        "outcome": verdict.word,
        "killed_by": verdict.killed_by,
        "tests": verdict.tests,
    }


class Report:
    """Prints progress, and the survivors at the end."""

    def __init__(self, total: int) -> None:
        self._total = total
        self.verdicts: list[Verdict] = []

    def tell(self, text: str) -> None:
        """Print a line."""
        print(text, flush=True)

    def add(self, verdict: Verdict) -> None:
        """Print what became of a mutant."""
        self.verdicts.append(verdict)
        mutant = verdict.mutant
        by = f" by {verdict.killed_by}" if verdict.killed_by else ""
        place = f"{mutant.module}:{mutant.line}"
        self.tell(f"[{len(self.verdicts)}/{self._total}] {verdict.word} {mutant.operator} {place}{by}")

    def end(self, packages: Iterable[str]) -> float:
        """Print the survivors and the numbers, and return how many percent survived in the worst package."""
        for each in self.verdicts:
            if not each.killed_by:
                original = (ROOT / each.mutant.module).read_text()
                self.tell(f"\n{each.word}: {each.mutant.module}:{each.mutant.line} {each.mutant.operator}")
                self.tell(f"{each.mutant.difference(original)}\n{equivalents.entry(each.mutant)}")
        print()
        worst = 0.0
        for package in packages:
            mine = [each for each in self.verdicts if within_path(each.mutant.module, package)]
            words = Counter(each.word for each in mine)
            survived = 100 * (len(mine) - words["killed"]) / max(1, len(mine))
            worst = max(worst, survived)
            counts = ", ".join(f"{words[word]} {word}" for word in ("killed", "survived", "no test"))
            self.tell(f"{package}: {len(mine)} mutants, {counts}: {survived:.0f} % survive")
        return worst


def within_path(module: str, package: str) -> bool:
    """Return whether a module's path is that of a package, or in it."""
    path = package.replace(".", "/")
    return module == f"{path}.py" or module.startswith(f"{path}/")


def choose(packages: Iterable[str], imports: Imports, given: argparse.Namespace) -> list[Mutant]:
    """Return the mutants to run, in the order of the packages."""
    chosen: list[Mutant] = []
    listed = equivalents.read()
    for package in packages:
        paths = [imports.paths[name].relative_to(ROOT) for name in imports.modules(package)]
        found = [mutant for path in paths for mutant in mutants(str(path), (ROOT / path).read_text())]
        chosen += sample(equivalents.without(found, listed), given.sample, given.seed)
    return chosen


def run(chosen: list[Mutant], packages: list[str], imports: Imports, given: argparse.Namespace) -> Report:
    """Measure the tests, and run the mutants."""
    stalls.watch()  # once, for all processes
    report = Report(len(chosen))
    modules = [name for package in packages for name in imports.modules(package)]
    tests = given.tests or imports.tests_of(modules)
    if given.importing:
        tests = list(dict.fromkeys([*tests, *imports.tests_importing(modules)]))
    with Trees(given.jobs) as trees, ThreadPoolExecutor(given.jobs) as threads:
        try:
            reach = measure(map(dotted, tests), imports, trees, threads, report.tell)
            wanted = [reach.tests(mutant, given.budget) for mutant in chosen]
            used = {each.test: each for some in wanted for each in some}
            trial = Trial(trees, sorted({name.rsplit(".", 2)[0] for name in used}))
            failing = trial.failing([used[name] for name in sorted(used)])
            tell_of_others([*reach.others, *failing], len(reach.passed) - len(failing), report)
            jobs = [
                threads.submit(trial.of, mutant, [each for each in some if each.test not in failing])
                for mutant, some in zip(chosen, wanted, strict=True)
            ]
            for job in jobs:
                report.add(job.result())
        except BaseException:
            trees.stop()
            threads.shutdown(cancel_futures=True)
            raise
    return report


def tell_of_others(others: Collection[str], used: int, report: Report) -> None:
    """Say which tests are not used."""
    if others:
        report.tell(f"not used, because they do not pass without mutants: {', '.join(sorted(others))}")
    report.tell(f"{used} tests")


def main(arguments: list[str]) -> int:
    """Run, and return the exit code."""
    given = options(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("The run was ended from outside."))
    imports = Imports(ROOT)
    packages = [dotted(name) for name in given.modules]
    if unknown := [package for package in packages if not imports.modules(package)]:
        print(f"no such module: {', '.join(unknown)}", file=sys.stderr)
        return 2
    chosen = choose(packages, imports, given)
    if given.list:
        for mutant in chosen:
            print(f"{mutant.module}:{mutant.line} {mutant.operator}: {mutant.before} -> {mutant.after}")
        return 0
    try:
        report = run(chosen, packages, imports, given)
    except NoResults as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    if given.json:
        given.json.write_text(json.dumps([as_json(each) for each in report.verdicts], indent=1) + "\n")
    return 0 if report.end(packages) <= given.most else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
