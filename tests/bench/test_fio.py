# SPDX-License-Identifier: Apache-2.0
"""Both sides of the bench of volumes' speed ask fio for the same, and its answer is understood."""

from __future__ import annotations

import json

from twisted.trial.unittest import SynchronousTestCase

from bench.fio import JOBS, Job


class JobTests(SynchronousTestCase):
    def test_both_sides_do_the_same_with_the_same_bytes(self) -> None:
        for job in JOBS:
            there, here = job.command(("ld.so", "fio"), "/dev/volume"), job.command(("fio",), "/srv/a.raw")
            self.assertEqual(there[:2] + here[:1], ["ld.so", "fio", "fio"])
            different = set(there[2:]) ^ set(here[1:])
            self.assertEqual(different, {"--filename=/dev/volume", "--filename=/srv/a.raw"})
            self.assertIn("--direct=1", here)

    def test_requests_in_a_second_are_those_of_the_job_s_own_kind(self) -> None:
        answer = {"jobs": [{"read": {"iops": 12.5}, "write": {"iops": 99.0}}]}
        output = f"fio: a notice\n{json.dumps(answer)}\n"
        self.assertEqual(Job("", "randread", "4k").speed(output), 12.5)
        self.assertEqual(Job("", "write", "1M").speed(output), 99.0)
