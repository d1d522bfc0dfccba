"""``python -m tests``: what it counts, what it fails, and how it ends."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from tests.__main__ import ROOT, dotted

SAMPLES = "tests.harness.samples"


def run(*arguments: str) -> tuple[int, str, dict[str, str]]:
    """Run the runner: its exit code, its output, and each test's word by the name of its method."""
    done = subprocess.run(
        [sys.executable, "-m", "tests", *arguments],
        cwd=ROOT,
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
        code, output, words = run(f"{SAMPLES}.Blocking", "--once")
        self.assertEqual(set(words.values()), {"FAILED"}, output)
        self.assertEqual((code, output.splitlines()[-1]), (1, "0 passed, 5 failed, 0 skipped"), output)
        for named in (
            r"time\.sleep blocked the reactor for \d+ ms",
            r"blocked the reactor for \d+ ms in infranetes\.pretended\.compute\n",
            r"blocked the reactor for \d+ ms in infranetes\.pretended\.sleep_after_a_wait\n",
            r"infranetes\.pretended\.Sleepy \(reading or writing\) blocked the reactor",
            r"pretended\.py\", line \d+, in sleep_after_a_wait",  # the line itself, not only the callback
        ):
            self.assertRegex(output, named)

    def test_one_that_does_not_block_again_by_itself_has_passed(self) -> None:
        marker = Path(self.mktemp()).absolute()
        os.environ["BLOCKED_ONCE"] = str(marker)
        self.addCleanup(os.environ.pop, "BLOCKED_ONCE")
        code, output, _words = run(f"{SAMPLES}.BlockingByChance")
        self.assertEqual((code, output.splitlines()[-1]), (0, "1 passed, 0 failed, 0 skipped"), output)
        self.assertIn("runs again by itself", output)
        marker.unlink()
        code, output, _words = run(f"{SAMPLES}.BlockingByChance", "--once")
        self.assertEqual((code, output.splitlines()[-1]), (1, "0 passed, 1 failed, 0 skipped"), output)

    def test_one_that_fails_has_failed_however_many_pass(self) -> None:
        code, output, _words = run(f"{SAMPLES}.FailingOnce")
        self.assertEqual((code, output.splitlines()[-1]), (1, "100 passed, 1 failed, 0 skipped"), output)
        self.assertNotIn("runs again", output)

    def test_waiting_elsewhere_and_a_busy_machine_fail_nothing(self) -> None:
        code, output, words = run(f"{SAMPLES}.Innocent")
        self.assertEqual(set(words.values()), {"ok"}, output)
        self.assertEqual((code, output.splitlines()[-1]), (0, "6 passed, 0 failed, 0 skipped"), output)

    def test_the_limit_is_an_option(self) -> None:
        for limit in ("500", "0"):
            code, output, _words = run(f"{SAMPLES}.Blocking", "--blocked", limit)
            self.assertEqual((code, output.splitlines()[-1]), (0, "5 passed, 0 failed, 0 skipped"), output)


class LeakTests(SynchronousTestCase):
    def test_what_stays_fails_its_test_and_is_named(self) -> None:
        code, output, words = run(f"{SAMPLES}.Leaking")
        self.assertEqual((code, output.splitlines()[-1]), (1, "1 passed, 3 failed, 0 skipped"), output)
        self.assertEqual(words["test_what_ends_soon"], "ok", output)
        self.assertRegex(output, r"left behind: process \d+ \(sleep 60\)")
        self.assertIn("left behind: thread forgotten", output)
        self.assertIn("left behind: socket listening on ('127.0.0.1'", output)
