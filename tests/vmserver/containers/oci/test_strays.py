# SPDX-License-Identifier: Apache-2.0
"""What is left of an agent that was killed as it created a container is found by its command line."""

from __future__ import annotations

import os
import subprocess
import sys

from twisted.trial.unittest import SynchronousTestCase

from vmserver.containers.oci import strays
from vmserver.containers.oci.strays import kill_strays

SLEEPING = (sys.executable, "-c", "import time; print(flush=True); time.sleep(600)")


class StrayTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.patch(strays, "_PAUSE_SECONDS", 0.0)

    def process(self, *words: str) -> subprocess.Popen[bytes]:
        """Start a process with these words on its command line."""
        made = subprocess.Popen([*SLEEPING, *words], stdout=subprocess.PIPE)
        self.addCleanup(made.communicate)
        self.addCleanup(made.kill)
        assert made.stdout is not None
        made.stdout.readline()
        return made

    def test_its_conmon_and_its_crun_are_killed_and_nothing_else(self) -> None:
        strays_ = [self.process("--cid=c1"), self.process("create", "--bundle", "/b", "c1")]
        others = [
            self.process("--cid=c10"),
            self.process("create", "--bundle", "/b", "c2"),
            self.process("create", "c1"),
            self.process("--bundle", "/b", "c1"),
        ]
        kill_strays("c1")
        self.assertEqual([each.wait(10) for each in strays_], [-9, -9])
        self.assertEqual([each.poll() for each in others], [None] * 4)

    def test_a_process_that_ends_as_it_is_looked_at_hides_no_other(self) -> None:
        listdir = os.listdir
        self.patch(os, "listdir", lambda path: [str(2**22 + 1), *listdir(path)])
        stray = self.process("--cid=c1")
        kill_strays("c1")
        self.assertEqual(stray.wait(10), -9)

    def test_it_ends_although_there_is_always_another_one(self) -> None:
        looked = []

        def found(id: str) -> list[int]:
            looked.append(id)
            return [2**22 + 1]  # no such process: it has ended by itself

        self.patch(strays, "_strays", found)
        kill_strays("c1")
        self.assertEqual(len(looked), 100)

    def test_it_looks_again_until_there_was_none_for_a_while(self) -> None:
        answers = [[], [2**22 + 1], *([list[int]()] * 50)]
        self.patch(strays, "_strays", lambda id: answers.pop(0))
        kill_strays("c1")
        self.assertEqual(52 - len(answers), 2 + 8)
