# SPDX-License-Identifier: Apache-2.0
"""A file that was closed while the reactor had it fails the test that did so, and no later one."""

from __future__ import annotations

import contextlib
import os

from twisted.internet.epollreactor import EPollReactor
from twisted.internet.interfaces import IReadDescriptor
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase
from zope.interface import implementer

from tests.harness.registry import closed_files


@implementer(IReadDescriptor)
class _File:
    """An end of a pipe that a reactor reads."""

    def __init__(self, number: int) -> None:
        self.number = number

    def fileno(self) -> int:
        return self.number

    def logPrefix(self) -> str:
        return "file"

    def doRead(self) -> None:
        raise AssertionError("the reactor does not run")

    def connectionLost(self, reason: Failure) -> None:
        raise AssertionError("the reactor does not run")


class ClosedFilesTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.reactor = EPollReactor()
        self.addCleanup(self.reactor._poller.close)
        self.own = set(self.reactor.getReaders())
        for waker in self.own:
            self.addCleanup(waker.connectionLost, Failure(Exception()))
        self.closed, self.open = _File(self.pipe()), _File(self.pipe())
        self.reactor.addReader(self.open)
        self.reactor.addReader(self.closed)

    def pipe(self) -> int:
        """Return the reading end of a new pipe."""
        reading, writing = os.pipe()
        self.addCleanup(os.close, writing)
        self.addCleanup(self.close, reading)
        return reading

    def close(self, number: int) -> None:
        with contextlib.suppress(OSError):
            os.close(number)

    def told(self) -> None:
        """Check that the closed file is told once and that the reactor goes on with the other."""
        (told,) = closed_files(self.reactor)
        self.assertIn(f"file {self.closed.number}", told)
        self.assertEqual(closed_files(self.reactor), [])
        self.assertEqual(set(self.reactor.getReaders()) - self.own, {self.open})
        self.assertEqual(set(self.reactor.removeAll()), {self.open})

    def test_what_is_open_is_left(self) -> None:
        self.assertEqual(closed_files(self.reactor), [])
        self.assertEqual(set(self.reactor.getReaders()) - self.own, {self.open, self.closed})

    def test_one_that_is_still_in_the_reactor(self) -> None:
        self.close(self.closed.number)
        self.told()

    def test_one_that_says_so_itself(self) -> None:
        number = self.closed.number
        self.closed.number = -1
        (told,) = closed_files(self.reactor)
        self.assertIn(f"file {number}", told)

    def test_one_that_could_not_be_removed(self) -> None:
        self.close(self.closed.number)
        self.assertRaises(OSError, self.reactor.removeReader, self.closed)
        self.assertRaises(KeyError, self.reactor.getReaders)
        self.told()
