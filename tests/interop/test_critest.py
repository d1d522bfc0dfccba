# SPDX-License-Identifier: Apache-2.0
"""What judges: expectations, verdicts, and that critest-expected.toml speaks of critest's own specs."""

from __future__ import annotations

import io
import json
import re
import subprocess
import tarfile
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from tests.harness.needs import needs_programs, needs_tools
from tests.interop.critest_benchmark import seconds
from tests.interop.critest_images import File, layer
from tests.interop.critest_report import (
    BadExpectation,
    Expectation,
    differences,
    document,
    expectations,
    judge,
    line,
    shortfalls,
    strangers,
)
from tests.interop.critest_specs import CRITEST, FAILED, PASSED, SKIPPED, Outcome, Spec, _outcome, listed

GOOD = Outcome("works", PASSED, 1.0)
BAD = Outcome("fails", FAILED, 1.0, "said so")
SHY = Outcome("does not apply", SKIPPED, 1.0, "not here")


def expecting(*specs: str) -> dict[str, Expectation]:
    return {spec: Expectation(spec, "vm", "it can't") for spec in specs}


class VerdictTests(SynchronousTestCase):
    def test_all_passed_is_good(self) -> None:
        self.assertTrue(judge([GOOD], {}).good)

    def test_nothing_run_is_not_good(self) -> None:
        self.assertFalse(judge([], {}).good)

    def test_what_is_not_listed_has_to_pass(self) -> None:
        verdict = judge([GOOD, BAD, SHY], expecting(SHY.spec))
        self.assertFalse(verdict.good)
        self.assertEqual(verdict.unlisted, (BAD,))

    def test_a_spec_that_skips_itself_has_to_be_listed_too(self) -> None:
        self.assertEqual(judge([GOOD, SHY], {}).unlisted, (SHY,))

    def test_what_is_listed_and_fails_is_good(self) -> None:
        self.assertTrue(judge([GOOD, BAD, SHY], expecting(BAD.spec, SHY.spec)).good)

    def test_what_is_listed_may_not_pass(self) -> None:
        verdict = judge([GOOD], expecting(GOOD.spec))
        self.assertFalse(verdict.good)
        self.assertEqual(verdict.passing, (GOOD,))

    def test_a_spec_that_failed_and_passes_later_has_failed(self) -> None:
        better = Outcome(BAD.spec, PASSED, 2.0)
        self.assertEqual(judge([BAD, better], {}).unlisted, (BAD,))

    def test_a_hundred_specs_pass_and_more_than_containerds(self) -> None:
        def passed(number: int, websocket: int = 0) -> list[Outcome]:
            names = [f"spec {each}" for each in range(number)]
            return [Outcome(name, PASSED, 1.0) for name in names + ["websocket: x"] * websocket]

        self.assertEqual(shortfalls({"infranetes": passed(100)}), [])
        self.assertEqual(shortfalls({"infranetes": passed(101), "containerd": [*passed(100), BAD]}), [])
        (few,) = shortfalls({"infranetes": passed(99, websocket=5)})
        self.assertIn("passed 99 specs, and should pass 100", few)
        (behind,) = shortfalls({"infranetes": passed(104, websocket=5), "containerd": passed(104)})
        self.assertIn("more than the 104 of containerd", behind)
        both = {"infranetes": [*passed(90), BAD], "containerd": passed(91)}
        self.assertEqual(len(shortfalls(both)), 2)
        self.assertFalse(document(both, judge([GOOD], {}), shortfalls(both), 1.0)["good"])

    def test_through_another_socket_each_spec_ends_as_it_does_directly(self) -> None:
        direct, through = "containerd", "containerd through infranetes"
        runs = {direct: [GOOD, BAD, SHY], through: [SHY, BAD, GOOD]}
        self.assertEqual(differences(runs, direct, through), [])
        self.assertTrue(document(runs, judge([], {}), [], 1.0)["good"], "of which nothing else is judged")
        runs[through][1] = Outcome(BAD.spec, PASSED, 1.0)
        runs[through][2] = Outcome(GOOD.spec, FAILED, 1.0, "no")
        better, worse = differences(runs, direct, through)
        self.assertIn("fails: failed with containerd, passed with", better)
        self.assertIn("works: passed with containerd, failed with containerd through infranetes: no", worse)
        self.assertEqual(len(differences({direct: [], through: []}, direct, through)), 1)
        self.assertEqual(differences({"infranetes": [GOOD]}, direct, through), [])

    def test_the_counts_tell_websocket_apart(self) -> None:
        self.assertEqual(
            line([GOOD, BAD, SHY, Outcome("websocket: x", PASSED, 1.0)]),
            "1 of 3 passed, 1 failed, 1 skipped; by WebSocket 1 of 1 passed, 0 failed, 0 skipped",
        )

    def test_the_document_is_json_with_every_outcome(self) -> None:
        runs = {"infranetes": [GOOD, BAD], "containerd": [GOOD]}
        said = json.loads(json.dumps(document(runs, judge(runs["infranetes"], {}), [], 3.21)))
        self.assertEqual((said["good"], said["unlisted"], said["seconds"]), (False, [BAD.spec], 3.2))
        self.assertEqual(said["runtimes"]["containerd"]["counts"], {"passed": 1, "failed": 0, "skipped": 0})


class ExpectationTests(SynchronousTestCase):
    def read(self, text: str) -> dict[str, Expectation]:
        path = Path(self.mktemp())
        path.write_text(text)
        return expectations(path)

    def test_an_entry_has_a_kind_and_a_reason(self) -> None:
        entry = '[[expected]]\nspec = "a"\nkind = "vm"\nreason = "it can\'t"\n'
        self.assertEqual(self.read(entry), expecting("a"))
        for broken in (
            entry.replace("vm", "whatever"),
            entry.replace("it can't", " "),
            entry.replace("reason", "excuse"),
            entry + entry,
        ):
            self.assertRaises(BadExpectation, self.read, broken)

    def test_an_entry_may_be_of_what_runs_the_containers(self) -> None:
        path = Path(self.mktemp())
        entry = '[[expected]]\nspec = "{}"\nkind = "missing"\nreason = "it lacks"\n'
        path.write_text(entry.format("a") + entry.format("b") + 'containers = "docker"\n')
        for containers, specs in (("docker", {"a", "b"}), ("oci", {"a"}), ("", {"a", "b"})):
            self.assertEqual(set(expectations(path, containers)), specs)

    def test_what_a_delegate_answers_is_expected_where_there_is_one(self) -> None:
        path = Path(self.mktemp())
        path.write_text('[[expected]]\nspec = "a"\nkind = "delegate"\nreason = "it says so"\n')
        self.assertEqual(set(expectations(path, "oci")), {"a"})
        self.assertEqual(set(expectations(path, "oci", delegate=False)), set())

    @needs_tools("critest")
    def test_those_of_the_project_are_of_specs_that_there_are(self) -> None:
        if not CRITEST.exists():
            self.fail(f"{CRITEST} is missing: make tools")
        specs = listed()
        self.assertEqual(len([each for each in specs if not each.flags]), 117)
        self.assertEqual(len([each for each in specs if each.flags]), 5)
        self.assertEqual(strangers(expectations(), [each.name for each in specs]), [])


class SpecTests(SynchronousTestCase):
    def test_the_focus_matches_nothing_else(self) -> None:
        spec = Spec("Image fields should not have Uid|Username empty [Conformance]")
        name = f"CRI validation [k8s.io] {spec.name}"
        self.assertTrue(re.search(spec.focus, name))
        self.assertFalse(re.search(spec.focus, name + " again"))
        self.assertFalse(re.search(spec.focus, "Image fields should not have Uid"))

    def test_no_report_is_a_failure(self) -> None:
        outcome = _outcome(Spec("a"), Path(self.mktemp()), 5.0)
        self.assertEqual((outcome.state, outcome.message), (FAILED, "critest gave no report in 5 s"))

    def test_a_spec_that_was_interrupted_has_failed(self) -> None:
        report = Path(self.mktemp())
        it = {
            "LeafNodeType": "It",
            "LeafNodeText": "a",
            "State": "interrupted",
            "Failure": {"Message": "x\n y"},
        }
        report.write_text(json.dumps([{"SpecReports": [it]}]))
        outcome = _outcome(Spec("a"), report, 1.0)
        self.assertEqual((outcome.state, outcome.message), (FAILED, "x y"))


class BenchmarkTests(SynchronousTestCase):
    def test_critests_nanoseconds_are_read_by_call(self) -> None:
        results = {
            "operationsNames": ["CreatePod", "StopPod"],
            "datapoints": [
                {"sampleIndex": 1, "operationsDurationsNs": [2_000_000_000, 5_000_000]},
                {"sampleIndex": 0, "operationsDurationsNs": [1_000_000_000, 4_000_000]},
            ],
        }
        self.assertEqual(seconds(results), {"CreatePod": [1.0, 2.0], "StopPod": [0.004, 0.005]})


class LayerTests(SynchronousTestCase):
    def test_commands_are_hard_links_and_bits_stay(self) -> None:
        files = {
            "bin": File(mode=0o755, directory=True),
            "bin/box": File(b"box", 0o4755),
            "bin/ls": File(same="bin/box", mode=0o755),
        }
        with tarfile.open(fileobj=io.BytesIO(layer(files))) as tar:
            self.assertTrue(tar.getmember("bin").isdir())
            self.assertEqual(tar.getmember("bin/box").mode, 0o4755)
            self.assertTrue(tar.getmember("bin/ls").islnk())
        self.assertEqual(layer(files), layer(files))

    @needs_programs("gcc")
    def test_the_server_and_the_set_user_id_program_are_c_that_compiles(self) -> None:
        for source in Path(__file__).parent.joinpath("critest_images").glob("*.c"):
            check = ["gcc", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", str(source)]
            done = subprocess.run(check, capture_output=True, text=True, check=False)
            self.assertEqual(done.returncode, 0, done.stderr)
