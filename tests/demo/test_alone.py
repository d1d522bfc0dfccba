# SPDX-License-Identifier: Apache-2.0
"""What the demo needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

TREE = Path(__file__).resolve().parents[2]
#: Of setup.py's extras `test`, `bench` and `lint`.
OF_TESTS = (
    "hypothesis",
    "coverage",
    "grpc",
    "moto",
    "flask",
    "boto3",
    "jsonschema",
    "matplotlib",
    "docker",
    "mypy",
)
BEGIN = "import sys; sys.modules.update(dict.fromkeys(sys.argv[1:])); import demo.__main__"


class AloneTests(SynchronousTestCase):
    def test_it_starts_without_the_libraries_that_only_tests_and_benches_need(self) -> None:
        command = [sys.executable, "-c", BEGIN, *OF_TESTS]
        done = subprocess.run(command, cwd=TREE, check=False, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
