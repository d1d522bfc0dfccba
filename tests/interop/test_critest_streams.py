# SPDX-License-Identifier: Apache-2.0
"""What measures streams: the scripts of both sides, and that lost bytes are no figure."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

from twisted.trial.unittest import SynchronousTestCase

from tests.interop.critest_benchmark import NoFigures
from tests.interop.critest_streams import BLOCK, Stream, giving, mib, received, sent, taking

SIZE = 32 * BLOCK
_ONE_LOST = "dd of=/dev/null bs=1 count=1 2>/dev/null; dd"


class StreamTests(SynchronousTestCase):
    def carried(self, script: str, carry: Callable[[Stream, int], float]) -> float:
        with subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as shell:
            assert shell.stdin is not None and shell.stdout is not None
            return carry(Stream(shell.stdout, shell.stdin), SIZE)

    def test_every_byte_each_way_is_a_figure(self) -> None:
        self.assertGreater(self.carried(giving(SIZE), received), 0)
        self.assertGreater(self.carried(taking(SIZE), sent), 0)

    def test_a_block_more_or_less_that_comes_is_an_error(self) -> None:
        for size in (SIZE - BLOCK, SIZE + BLOCK):
            self.assertRaises(NoFigures, self.carried, giving(size), received)

    def test_a_byte_that_is_lost_on_the_way_there_is_an_error(self) -> None:
        script = taking(SIZE).replace("dd", _ONE_LOST, 1)
        self.assertRaises(NoFigures, self.carried, script, sent)

    def test_more_than_was_sent_that_arrives_is_an_error(self) -> None:
        self.assertRaises(NoFigures, self.carried, taking(SIZE - BLOCK), sent)

    def test_a_script_that_does_not_run_is_an_error(self) -> None:
        self.assertRaises(NoFigures, self.carried, "echo sh: not found", received)


class MemoryTests(SynchronousTestCase):
    def test_a_size_of_proc_is_read_by_its_name(self) -> None:
        status = "Name:\ttwistd\nVmPeak:\t  999999 kB\nVmHWM:\t   92160 kB\nVmRSS:\t   81920 kB\n"
        self.assertEqual((mib(status, "VmHWM"), mib(status, "VmRSS")), (90, 80))
