# SPDX-License-Identifier: Apache-2.0
"""The whole tool, in a repository that has one small module."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from tests.harness.durations import slow
from tests.harness.needs import nightly
from tests.mutants.run_tests import ROOT
from tests.support.waiting import until

MODULE = """
def seen(a):
    return a > 1


def overlooked(a):
    return max(a, 1)


def never_run(a):
    return min(a, 1)


def endless(a):
    while a < 3:
        a += 1
    return a
"""
TESTS = """
from twisted.trial.unittest import SynchronousTestCase

from txgrpc import small


class SmallTests(SynchronousTestCase):
    def test_seen(self):
        self.assertTrue(small.seen(2))
        self.assertFalse(small.seen(1))

    def test_overlooked(self):
        small.overlooked(1)

    def test_endless(self):
        self.assertEqual(small.endless(0), 3)

    def test_broken(self):
        small.overlooked(1)
        self.fail("It always fails.")
"""
EQUIVALENTS = """
[[equivalent]]
module = "txgrpc/small.py"
function = "overlooked"
before = "return max(a, 1)"
after = "return min(a, 1)"
reason = "Nobody calls it with anything else than 1."
"""

OVERLOOKED = "txgrpc/small.py:7 other_extreme: return max(a, 1) -> return min(a, 1)"


@nightly  # half a minute of processor
@slow(3, "it runs the tool, on a repository of its own")
class RunTests(TestCase):
    """Runs the tool as a person would."""

    def setUp(self) -> None:
        self.root = Path(self.mktemp()).absolute()
        for name in ("guests", "harness", "mutants", "support"):
            shutil.copytree(ROOT / "tests" / name, self.root / "tests" / name)
        shutil.copy(ROOT / "tests" / "__init__.py", self.root / "tests")
        self.write("txgrpc/__init__.py", "")
        self.write("txgrpc/small.py", MODULE)
        self.write("tests/txgrpc/__init__.py", "")
        self.write("tests/txgrpc/test_small.py", TESTS)
        self.write("tests/mutants/equivalents.toml", "equivalent = []")
        self.place = self.root.with_name("place")
        self.place.mkdir()

    def write(self, path: str, text: str) -> None:
        """Write a file of the repository."""
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start the tool."""
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.mutants", "--json=out.json", "txgrpc/small.py", *arguments],
            cwd=self.root,
            env={**os.environ, "TMPDIR": str(self.place)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        return process

    def run_tool(self, *arguments: str) -> tuple[int, str, list[dict[str, Any]]]:
        """Run it, and return its exit code, output and results."""
        process = self.start(*arguments)
        output, _ = process.communicate()
        results = self.root / "out.json"
        return process.returncode, output, json.loads(results.read_text()) if results.exists() else []

    @slow(20, "a dozen mutants are run, of which one never ends")
    def test_who_is_killed_and_who_survives(self) -> None:
        code, output, results = self.run_tool()
        self.assertEqual(code, 1, output)
        outcomes = {(each["operator"], each["function"]): each["outcome"] for each in results}
        self.assertEqual(outcomes[("move_boundary", "seen")], "killed")
        self.assertEqual(outcomes[("other_extreme", "overlooked")], "survived")
        self.assertEqual(outcomes[("other_extreme", "never_run")], "no test")
        [endless] = [each for each in results if each["operator"] == "drop_assignment"]
        self.assertIn("no end", endless["killed_by"])
        self.assertIn("tests.txgrpc.test_small.SmallTests.test_broken", output)
        self.assertEqual((self.root / "txgrpc/small.py").read_text(), MODULE)
        self.assertEqual(list(self.place.iterdir()), [])

    def test_who_is_listed_as_equivalent_is_not_run(self) -> None:
        _, before, _ = self.run_tool("--list")
        self.write("tests/mutants/equivalents.toml", EQUIVALENTS)
        _, after, _ = self.run_tool("--list")
        self.assertEqual(set(before.splitlines()) - set(after.splitlines()), {OVERLOOKED})

    def test_a_sample_is_the_same_each_time(self) -> None:
        listed = [self.run_tool("--list", "--sample=4", f"--seed={seed}")[1] for seed in "112"]
        self.assertEqual(len(listed[0].splitlines()), 4)
        self.assertEqual(listed[0], listed[1])
        self.assertNotEqual(listed[0], listed[2])

    async def test_an_interrupt_leaves_nothing_behind(self) -> None:
        sleeping = TESTS.replace("small.overlooked(1)", "import time; time.sleep(600)")
        self.write("tests/txgrpc/test_small.py", sleeping)
        process = self.start()

        def runs() -> bool:
            return any("test_broken" in log.read_text() for log in self.place.glob("*/*.log"))

        await until(runs, "a test that runs", 120)
        process.send_signal(signal.SIGINT)
        self.assertEqual(await deferToThread(process.wait), 130)
        self.assertEqual(list(self.place.iterdir()), [])

    def test_an_unknown_module(self) -> None:
        code, output, _ = self.run_tool("txgrpc/missing.py")
        self.assertEqual((code, output), (2, "no such module: txgrpc.missing\n"))
