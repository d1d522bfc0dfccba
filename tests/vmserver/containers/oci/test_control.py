# SPDX-License-Identifier: Apache-2.0
"""A conmon is told one thing at a time, and a deaf one is not waited for for ever."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.concurrency import start
from infranetes_common.errors import Unavailable
from vmserver.containers.oci.control import TAKEN_SECONDS, Control


class ControlTests(SynchronousTestCase):
    """The test reads the FIFOs, in conmon's place."""

    def setUp(self) -> None:
        self.bundle = Path(tempfile.mkdtemp(prefix="control-"))
        self.addCleanup(shutil.rmtree, self.bundle)
        self.clock = Clock()
        self.control = Control(self.clock, self.bundle)
        self.ctl, self.winsz = self.fifo("ctl"), self.fifo("winsz")

    def fifo(self, name: str) -> int:
        """Make a FIFO. Return its end for reading."""
        os.mkfifo(self.bundle / name)
        reader = os.open(self.bundle / name, os.O_RDONLY | os.O_NONBLOCK)
        self.addCleanup(os.close, reader)
        return reader

    def read(self) -> bytes:
        """Read what conmon is told."""
        try:
            return os.read(self.ctl, 4096)
        except BlockingIOError:
            return b""

    def test_a_size_is_told_as_rows_and_columns(self) -> None:
        for width, height in ((80, 24), (0, 0), (65535, 65535)):
            told = start(self.control.resize(width, height))
            self.assertEqual(self.read(), b"1 %d %d\n" % (height, width))
            self.clock.advance(1)
            self.successResultOf(told)

    def test_a_size_that_no_terminal_can_have_is_not_told(self) -> None:
        for width, height in ((-1, 24), (80, -1), (65536, 24), (80, 65536)):
            self.successResultOf(start(self.control.resize(width, height)))
            self.assertEqual(self.read(), b"", (width, height))

    def test_each_message_waits_for_the_one_before_it_and_of_sizes_only_the_last_is_told(self) -> None:
        log = self.bundle / "log"
        waiting = [start(self.control.resize(number, number)) for number in (1, 2, 3)]
        waiting.append(start(self.control.reopen_log(log)))
        for expected in (b"1 1 1\n", b"1 3 3\n", b"2 0 0\n"):
            self.clock.pump([0.1] * 5)
            self.assertEqual(self.read(), expected)
        self.clock.advance(1)
        for each in waiting:
            self.successResultOf(each)

    def test_a_message_waits_for_a_size_that_conmon_still_passes_on_to_itself(self) -> None:
        writer = os.open(self.bundle / "winsz", os.O_WRONLY)
        self.addCleanup(os.close, writer)
        os.write(writer, b"24 80\n")
        told = start(self.control.resize(80, 24))
        self.clock.pump([0.1] * 5)
        self.assertEqual(self.read(), b"")
        os.read(self.winsz, 100)
        self.clock.advance(0.1)
        self.assertEqual(self.read(), b"1 24 80\n")
        self.clock.advance(0.1)
        self.successResultOf(told)

    def test_a_log_that_appears_while_conmon_is_busy_is_not_made_anew(self) -> None:
        log = self.bundle / "log"
        waiting = [start(self.control.resize(80, 24)), start(self.control.reopen_log(log))]
        log.touch()
        self.read()
        self.clock.pump([0.1] * 5)
        for each in waiting:
            self.successResultOf(each)
        self.assertEqual(self.read(), b"")

    def test_a_conmon_that_does_not_read_is_not_waited_for_for_ever(self) -> None:
        told = start(self.control.resize(80, 24))
        self.clock.pump([0.05] * int((TAKEN_SECONDS - 0.5) / 0.05))
        self.assertNoResult(told)
        self.clock.pump([0.05] * 20)
        failure = self.failureResultOf(told, Unavailable)
        self.assertIn("does not read its control messages", str(failure.value))
        self.assertEqual(self.read(), b"1 24 80\n")
        told = start(self.control.resize(81, 25))
        self.assertEqual(self.read(), b"1 25 81\n")
        self.clock.advance(1)
        self.successResultOf(told)

    def test_without_a_reader_or_a_fifo_conmon_has_ended(self) -> None:
        os.unlink(self.bundle / "winsz")
        self.successResultOf(start(self.control.resize(80, 24)))
        os.mkfifo(self.bundle / "winsz")
        self.successResultOf(start(self.control.resize(80, 24)))
        self.assertEqual(self.read(), b"")

    def test_another_failure_names_the_fifo(self) -> None:
        os.unlink(self.bundle / "ctl")
        (self.bundle / "ctl").mkdir()
        failure = self.failureResultOf(start(self.control.resize(80, 24)), Unavailable)
        self.assertIn(str(self.bundle / "ctl"), str(failure.value))

    def test_no_descriptor_is_left(self) -> None:
        before = len(os.listdir("/proc/self/fd"))
        told = start(self.control.resize(80, 24))
        self.assertEqual(len(os.listdir("/proc/self/fd")), before + 2)
        self.read()
        self.clock.advance(1)
        self.successResultOf(told)
        os.unlink(self.bundle / "winsz")
        self.successResultOf(start(self.control.resize(80, 24)))
        self.assertEqual(len(os.listdir("/proc/self/fd")), before)
