# SPDX-License-Identifier: Apache-2.0
"""infranetes-ctl's terminal, or the pipes in its place."""

from __future__ import annotations

import os
import signal
import tempfile
import termios

from twisted.internet.task import deferLater
from twisted.trial import unittest

from infranetes.ctl.terminal import LEAVE, Descriptor, Leaving, raw_terminal, window_size
from infranetes_common.concurrency import start
from infranetes_common.reactors import installed
from tests.support.waiting import until

reactor = installed()


class LeavingTests(unittest.SynchronousTestCase):
    """^] three times within a second."""

    def typed(self, *keys: tuple[float, bytes]) -> list[bool]:
        leaving = Leaving()
        return [leaving.typed(data, at) for at, data in keys]

    def test_one_by_one_or_at_once(self) -> None:
        self.assertEqual(self.typed((0, LEAVE), (0.5, LEAVE), (1.0, LEAVE)), [False, False, True])
        self.assertEqual(self.typed((0, b"x" + LEAVE * 3)), [True])

    def test_not_too_slowly_and_with_nothing_between(self) -> None:
        self.assertEqual(self.typed((0, LEAVE), (0.6, LEAVE), (1.2, LEAVE)), [False] * 3)
        self.assertEqual(self.typed((0, LEAVE * 2), (0.1, b"x"), (0.2, LEAVE)), [False] * 3)
        self.assertEqual(self.typed((0, LEAVE + b"x" + LEAVE + b"x" + LEAVE)), [False])

    def test_the_last_three_count(self) -> None:
        self.assertEqual(self.typed((0, LEAVE), (1.5, LEAVE), (2.0, LEAVE), (2.4, LEAVE))[-1], True)


class DescriptorTests(unittest.TestCase):
    def setUp(self) -> None:
        self.out, self.into = os.pipe()
        self.addCleanup(self.close, self.out)
        self.addCleanup(self.close, self.into)

    def close(self, fd: int) -> None:
        try:
            os.close(fd)
        except OSError:
            return  # the test has closed it

    async def test_what_is_there_and_the_end(self) -> None:
        reading = start(Descriptor(reactor, self.out).read())
        self.assertNoResult(reading)
        os.write(self.into, b"data")
        self.assertEqual(await reading, b"data")
        self.assertTrue(os.get_blocking(self.out), "it is as it was")
        os.close(self.into)
        self.assertEqual(await Descriptor(reactor, self.out).read(), b"")

    async def test_a_writer_waits_for_its_reader(self) -> None:
        writing = start(Descriptor(reactor, self.into).write(bytes(1_000_000)))
        await deferLater(reactor, 0.2, lambda: None)
        self.assertNoResult(writing)
        self.assertTrue(os.get_blocking(self.into), "it is as it was")
        size, reader = 0, Descriptor(reactor, self.out)
        while size < 1_000_000:
            size += len(await reader.read())
        await writing

    async def test_a_writer_whose_reader_is_gone(self) -> None:
        writing = start(Descriptor(reactor, self.into).write(bytes(1_000_000)))
        await deferLater(reactor, 0.1, lambda: None)
        os.close(self.out)
        await self.assertFailure(writing, BrokenPipeError)

    async def test_one_who_waits_no_more_takes_nothing(self) -> None:
        reading = start(Descriptor(reactor, self.out).read())
        reading.addErrback(lambda _: None)
        reading.cancel()
        os.write(self.into, b"data")
        await deferLater(reactor, 0.1, lambda: None)
        self.assertEqual(os.read(self.out, 10), b"data")

    async def test_files(self) -> None:
        with tempfile.TemporaryFile() as file:
            await Descriptor(reactor, file.fileno()).write(b"x" * 10_000)
            file.seek(0)
            self.assertEqual(await Descriptor(reactor, file.fileno()).read(), b"x" * 10_000)
            self.assertEqual(await Descriptor(reactor, file.fileno()).read(), b"")

    async def test_one_that_was_closed_from_the_beginning_has_ended(self) -> None:
        os.close(self.out)
        self.assertEqual(await Descriptor(reactor, self.out).read(), b"")


class TerminalTests(unittest.TestCase):
    def setUp(self) -> None:
        self.person, self.terminal = os.openpty()
        self.addCleanup(os.close, self.person)
        self.addCleanup(os.close, self.terminal)
        self.before = termios.tcgetattr(self.terminal)

    def echoes(self) -> bool:
        return bool(termios.tcgetattr(self.terminal)[3] & termios.ECHO)

    async def test_it_is_raw_meanwhile_and_as_before_after_an_error(self) -> None:
        handlers = [signal.getsignal(number) for number in (signal.SIGWINCH, signal.SIGHUP)]
        with self.assertRaises(ZeroDivisionError), raw_terminal(reactor, self.terminal, lambda: None):
            self.assertFalse(self.echoes())
            raise ZeroDivisionError
        self.assertEqual(termios.tcgetattr(self.terminal), self.before)
        self.assertEqual([signal.getsignal(number) for number in (signal.SIGWINCH, signal.SIGHUP)], handlers)

    async def test_another_size_is_told(self) -> None:
        told: list[tuple[int, int] | None] = []
        with raw_terminal(reactor, self.terminal, lambda: told.append(window_size(self.terminal))):
            termios.tcsetwinsize(self.person, (17, 91))
            os.kill(os.getpid(), signal.SIGWINCH)
            await until(lambda: told, "it is told")
        self.assertEqual(told, [(91, 17)])

    def test_a_size_that_is_none(self) -> None:
        self.assertIsNone(window_size(self.terminal))
        with open(os.devnull) as nothing:
            self.assertIsNone(window_size(nothing.fileno()))
