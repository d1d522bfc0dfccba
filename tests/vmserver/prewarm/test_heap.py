# SPDX-License-Identifier: Apache-2.0
"""Which memory a garbage collection writes to, in a process that shares its memory as a clone does."""

from __future__ import annotations

import subprocess
import sys

from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

# A child of fork(2) shares each page of its parent until it writes to it.
SCRIPT = """
import gc, os, sys
from vmserver.prewarm.heap import keep_heap_shared

kept = [[number] for number in range(100_000)]
if sys.argv[1] == "kept":
    keep_heap_shared()

def own():
    with open("/proc/self/smaps_rollup") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith("Private_Dirty:"))

if child := os.fork():
    os.waitpid(child, 0)
else:
    before = own()
    gc.collect()
    garbage = []
    garbage.append(garbage)
    del garbage
    print(own() - before, gc.collect())
"""


class HeapTests(TestCase):
    async def written(self, how: str) -> tuple[int, int]:
        """Return the KiB that a collection has written to, and how many objects the next one has freed."""
        command = [sys.executable, "-c", SCRIPT, how]
        done = await deferToThread(subprocess.run, command, stdout=subprocess.PIPE, check=True, text=True)
        kib, freed = done.stdout.split()
        return int(kib), int(freed)

    async def test_a_collection_writes_to_next_to_nothing_of_what_was_there(self) -> None:
        plain, _ = await self.written("plain")
        kept, freed = await self.written("kept")
        self.assertGreater(plain, 4_000)  # otherwise this shows nothing: each list's header was written to
        self.assertLess(kept, plain / 8)
        self.assertEqual(freed, 1)  # objects made later are collected as usual

    async def test_garbage_of_the_time_before_the_modules_were_frozen_is_freed(self) -> None:
        script = (
            "import gc, weakref\n"
            "from vmserver.prewarm.heap import keep_heap_shared\n"
            "class Ring: pass\n"
            "ring = Ring(); ring.itself = ring; seen = weakref.ref(ring); del ring\n"
            "gc.freeze(); keep_heap_shared(); print(seen())"
        )
        command = [sys.executable, "-c", script]
        done = await deferToThread(subprocess.run, command, stdout=subprocess.PIPE, check=True, text=True)
        self.assertEqual(done.stdout, "None\n")
