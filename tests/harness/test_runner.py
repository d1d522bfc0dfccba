# SPDX-License-Identifier: Apache-2.0
"""``python -m tests`` and ``trial``: what they count, what they fail, and how they end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from tests.__main__ import ROOT, dotted
from tests.harness.durations import slow
from tests.harness.guards import LIMIT_VARIABLE

SAMPLES = "tests.harness.samples"


def run(
    *arguments: str, place: Path | None = None, ci: bool | None = None, by: Sequence[str] = ()
) -> tuple[int, str, dict[str, str]]:
    """Run the runner; return its exit code, its output, and each test's word by the name of its method.

    :param place: the directory of runs. :param ci: whether CI is in the environment; None: as it is here.
    :param by: a command that runs it.
    """
    environment = dict(os.environ)
    if ci is not None:
        environment.pop("CI", None)
    if ci:
        environment["CI"] = "1"
    with tempfile.TemporaryDirectory() as temporary:
        done = subprocess.run(
            [
                *by,
                sys.executable,
                "-m",
                "tests",
                "--blocked=50",
                f"--temp-directory={place or temporary}",
                *arguments,
            ],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=100,
            check=False,
        )
    words: dict[str, str] = {}
    current = ""
    for line in done.stdout.splitlines():
        if started := re.match(r"tests\.\S+\.(\w+) \.\.\. ", line):
            current = started[1]
        if ended := re.search(r"(?:^| \.\.\. )(ok|FAILED|skipped).*\(\d+\.\d\d s\)$", line):
            words[current] = ended[1]
    return done.returncode, done.stdout, words


def run_trial(*arguments: str, blocked: str = "50") -> tuple[int, str]:
    """Run plain trial; return its exit code and its output."""
    with tempfile.TemporaryDirectory() as place:
        done = subprocess.run(
            [sys.executable, "-m", "twisted.trial", f"--temp-directory={place}/trial", *arguments],
            cwd=ROOT,
            env={**os.environ, LIMIT_VARIABLE: blocked},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=100,
            check=False,
        )
    return done.returncode, done.stdout


class PlainTrialTests(SynchronousTestCase):
    """The guards work without `python -m tests`, too."""

    def test_a_callback_that_blocks_fails_its_test_and_is_named(self) -> None:
        code, output = run_trial(f"{SAMPLES}.Blocking")
        self.assertEqual((code, output.splitlines()[-1]), (1, "FAILED (errors=7)"), output)
        self.assertRegex(output, r"time\.sleep blocked the reactor: it computed for \d ms and slept for")

    @slow(7, "a guard waits two seconds for each thing that stays")
    def test_what_stays_fails_its_test_and_is_named(self) -> None:
        code, output = run_trial(f"{SAMPLES}.Leaking")
        self.assertEqual((code, output.splitlines()[-1]), (1, "FAILED (errors=3, successes=1)"), output)
        self.assertIn("left behind: thread forgotten", output)

    def test_coroutines_run_to_their_end(self) -> None:
        code, output = run_trial(f"{SAMPLES}.Coroutine")
        self.assertEqual((code, output.splitlines()[-1]), (1, "FAILED (failures=1, errors=1)"), output)

    def test_what_does_neither_passes(self) -> None:
        code, output = run_trial(f"{SAMPLES}.Ending.test_passes", f"{SAMPLES}.Leaking.test_what_ends_soon")
        self.assertEqual((code, output.splitlines()[-1]), (0, "PASSED (successes=2)"), output)

    def test_the_limit_is_a_variable_of_the_environment(self) -> None:
        code, output = run_trial(f"{SAMPLES}.Blocking", blocked="0")
        self.assertEqual((code, output.splitlines()[-1]), (0, "PASSED (successes=7)"), output)


class CountingTests(SynchronousTestCase):
    def test_each_way_to_end_is_counted_once(self) -> None:
        code, output, words = run(f"{SAMPLES}.Ending")
        self.assertEqual(output.splitlines()[-1], "2 passed, 4 failed, 1 skipped", output)
        self.assertEqual(code, 1)
        self.assertEqual(
            words,
            {
                "test_passes": "ok",
                "test_fails": "FAILED",
                "test_breaks": "FAILED",
                "test_is_skipped": "skipped",
                "test_is_expected_to_fail": "ok",
                "test_passes_unexpectedly": "FAILED",
                "test_fails_and_its_cleanup_breaks": "FAILED",
            },
        )

    def test_coroutines_run_to_their_end(self) -> None:
        _code, output, _words = run(f"{SAMPLES}.Coroutine")
        self.assertEqual(output.splitlines()[-1], "0 passed, 2 failed, 0 skipped", output)

    def test_all_passed_is_exit_code_0(self) -> None:
        code, output, _words = run(f"{SAMPLES}.Ending.test_passes")
        self.assertEqual((code, output.splitlines()[-1]), (0, "1 passed, 0 failed, 0 skipped"))

    def test_a_module_that_can_not_be_imported_has_failed(self) -> None:
        code, output, _words = run("tests.harness.broken", f"{SAMPLES}.Ending.test_passes")
        self.assertEqual((code, output.splitlines()[-1]), (1, "1 passed, 1 failed, 0 skipped"))
        self.assertIn("a_part_that_is_missing", output)

    def test_a_name_that_is_not_there_has_failed(self) -> None:
        code, output, _words = run("tests.harness.nowhere")
        self.assertEqual((code, output.splitlines()[-1]), (1, "0 passed, 1 failed, 0 skipped"))

    def test_nothing_run_is_no_success(self) -> None:
        code, output, _words = run(SAMPLES, "--without", "tests.harness")
        self.assertEqual((code, output.splitlines()[-1]), (1, "0 passed, 0 failed, 0 skipped"))

    def test_only_skipped_is_no_success(self) -> None:
        code, output, _words = run(f"{SAMPLES}.Ending.test_is_skipped")
        self.assertEqual((code, output.splitlines()[-1]), (1, "0 passed, 0 failed, 1 skipped"))

    def test_paths_are_names_too(self) -> None:
        self.assertEqual(dotted(f"{ROOT}/tests/harness/samples.py"), SAMPLES)
        self.assertEqual(dotted(f"{ROOT}/tests/harness/"), "tests.harness")
        self.assertEqual(dotted("tests.harness"), "tests.harness")

    def test_the_slowest_are_listed(self) -> None:
        _code, output, _words = run(f"{SAMPLES}.Ending", "--slowest", "2")
        listed = output.partition("The slowest 2:\n")[2].partition("\n\n")[0]
        self.assertEqual(len(listed.splitlines()), 2, output)


class BlockingTests(SynchronousTestCase):
    def test_a_callback_that_blocks_fails_its_test_and_is_named(self) -> None:
        code, output, words = run(f"{SAMPLES}.Blocking")
        self.assertEqual(set(words.values()), {"FAILED"}, output)
        self.assertEqual((code, output.splitlines()[-1]), (1, "0 passed, 7 failed, 0 skipped"), output)
        for named in (
            r"time\.sleep blocked the reactor: it computed for \d ms and slept for (29|3\d)\d ms",
            r"Deferred\.callback blocked the reactor: it computed for (1[5-9]|2\d)\d ms and slept for \d+ ms",
            r"infranetes\.pretended\.Sleepy \(reading or writing\) blocked the reactor",
            r"pretended\.py\", line \d+ in sleep_after_a_wait",  # the line itself, not only the callback
            r"pretended\.py\", line \d+ in compute",
        ):
            self.assertRegex(output, named)

    def test_a_sleep_is_found_on_a_busy_machine_too(self) -> None:
        code, output, _words = run(f"{SAMPLES}.BlockingInHaste")
        self.assertEqual((code, output.splitlines()[-1]), (1, "0 passed, 1 failed, 0 skipped"), output)
        self.assertRegex(output, r"it computed for \d+ ms and slept for")

    def test_one_that_fails_has_failed_however_many_pass(self) -> None:
        code, output, _words = run(f"{SAMPLES}.FailingOnce")
        self.assertEqual((code, output.splitlines()[-1]), (1, "100 passed, 1 failed, 0 skipped"), output)
        self.assertEqual(output.count("test_fails ... "), 1, output)

    @slow(5, "what is innocent takes long, while the machine is kept busy")
    def test_waiting_elsewhere_and_a_busy_machine_fail_nothing(self) -> None:
        code, output, words = run(f"{SAMPLES}.Innocent")
        self.assertEqual(set(words.values()), {"ok"}, output)
        self.assertEqual((code, output.splitlines()[-1]), (0, "6 passed, 0 failed, 0 skipped"), output)

    def test_the_limit_is_an_option(self) -> None:
        for limit in ("500", "0"):
            code, output, _words = run(f"{SAMPLES}.Blocking", "--blocked", limit)
            self.assertEqual((code, output.splitlines()[-1]), (0, "7 passed, 0 failed, 0 skipped"), output)


class LeakTests(SynchronousTestCase):
    @slow(7, "a guard waits two seconds for each thing that stays")
    def test_what_stays_fails_its_test_and_is_named(self) -> None:
        code, output, words = run(f"{SAMPLES}.Leaking")
        self.assertEqual((code, output.splitlines()[-1]), (1, "1 passed, 3 failed, 0 skipped"), output)
        self.assertEqual(words["test_what_ends_soon"], "ok", output)
        self.assertRegex(output, r"left behind: process \d+ \(sleep 60\)")
        self.assertIn("left behind: thread forgotten", output)
        self.assertIn("left behind: socket listening on ('127.0.0.1'", output)


class SideBySideTests(SynchronousTestCase):
    def test_classes_are_counted_as_if_they_ran_one_after_the_other(self) -> None:
        names = [f"{SAMPLES}.{each}" for each in ("Ending", "FailingOnce", "Coroutine")]
        ends = []
        for jobs in ("1", "3"):
            code, output, words = run(*names, "tests.harness.broken", "--jobs", jobs)
            failed = sorted(re.findall(r"^Failed: (.*)$", output, re.MULTILINE))
            ends.append((code, output.splitlines()[-1], words, failed))
        self.assertEqual(ends[0], ends[1])
        self.assertEqual(ends[0][1], "102 passed, 8 failed, 1 skipped")

    def test_what_a_class_shares_is_made_once_and_goes(self) -> None:
        code, output, _words = run(f"{SAMPLES}.Fixture", f"{SAMPLES}.Ending.test_passes", "--jobs", "2")
        self.assertEqual((code, output.splitlines()[-1]), (0, "3 passed, 0 failed, 0 skipped"), output)
        self.assertEqual(output.count("made 1 times, and gone"), 1, output)

    def test_a_process_that_dies_fails_the_test_that_ran_and_another_runs_the_rest(self) -> None:
        code, output, _words = run(f"{SAMPLES}.Dying", f"{SAMPLES}.FailingOnce", "--jobs", "2")
        self.assertEqual((code, output.splitlines()[-1]), (1, "102 passed, 2 failed, 0 skipped"), output)
        self.assertIn("ended without a result, with code 3", output)

    def test_a_test_that_blocks_fails_there_too(self) -> None:
        code, output, _words = run(f"{SAMPLES}.Blocking", f"{SAMPLES}.Ending", "--jobs", "2")
        self.assertEqual((code, output.splitlines()[-1]), (1, "2 passed, 11 failed, 1 skipped"), output)
