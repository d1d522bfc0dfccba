# SPDX-License-Identifier: Apache-2.0
"""What `make bench` makes for the benches that are chosen."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from bench.__main__ import BENCHES, CHOICES, main
from bench.daemon import ROOT
from bench.needs import BY_BENCH, TARGETS, needed


class NeedsTests(SynchronousTestCase):
    def test_each_bench_has_its_needs_and_nothing_else_has(self) -> None:
        self.assertEqual({*BY_BENCH} & {*BENCHES}, {*BENCHES})
        variants = {f"{bench}:{choice}" for bench, choices in CHOICES.items() for choice in choices}
        self.assertEqual({*BY_BENCH} - {*BENCHES} - variants, set())

    def test_a_bench_with_vms_needs_their_image(self) -> None:
        for name, (module, _) in BENCHES.items():
            source = (ROOT / module.replace(".", "/")).with_suffix(".py").read_text()
            alone = "docker=True" in source
            wanted = {"image-docker" if alone else "image"} if "report.setup" in source else set()
            self.assertEqual({*needed([name])} & {"image", "image-docker"}, wanted, name)

    def test_what_several_need_is_named_once_and_what_a_variant_needs_is_its_own(self) -> None:
        self.assertEqual(needed(["pods", "waits", "floor"]), ["apt-test", "tools", "image", "image-docker"])
        self.assertEqual(needed(["memory:docker", "rpc"]), ["apt-test", "image-docker"])
        self.assertEqual(needed(["waits:pool"]), needed(["waits"]))

    def test_the_makefile_has_each_target(self) -> None:
        rules = re.findall(r"^([a-z-]+):(?!=)", (ROOT / "Makefile").read_text(), flags=re.M)
        self.assertEqual({*TARGETS} - {*rules}, set())
        self.assertEqual({*needed(BENCHES)} - {*TARGETS}, set())

    def test_the_command_line_prints_them_and_runs_nothing(self) -> None:
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            main(["--needs", "memory:docker"])
        self.assertEqual(said.getvalue(), "apt-test image-docker\n")


class MakeTests(SynchronousTestCase):
    """`make --dry-run`, which asks the benches all the same."""

    def would_run(self, benches: str) -> str:
        programs = Path(self.mktemp()).absolute()
        programs.mkdir()
        (programs / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        (programs / "python").chmod(0o755)
        command = ["make", "--dry-run", "bench", f"BENCHES={benches}", f"BIN={programs}"]
        done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def test_a_bench_without_vms_builds_no_guest_image(self) -> None:
        said = self.would_run("rpc")
        self.assertIn("-m bench --json", said)
        self.assertNotIn("infranetes-guest build", said)

    def test_one_with_docker_builds_that_image_alone(self) -> None:
        built = re.findall(r"infranetes-guest build .*", self.would_run("pods"))
        self.assertEqual(len(built), 1, built)
        self.assertIn('--containers "docker"', built[0])

    def test_an_unknown_bench_is_refused_before_anything_is_made(self) -> None:
        command = ["make", "--dry-run", "bench", "BENCHES=fast", f"BIN={Path(sys.executable).parent}"]
        done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("no bench is called fast", done.stderr)
