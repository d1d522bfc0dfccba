# SPDX-License-Identifier: Apache-2.0
"""When a cloud is asked for a console, and what its readers are told."""

from __future__ import annotations

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase
from zope.interface.verify import verifyObject

from infranetes.providers.cloud.guests.console import FIRST_PAUSE, LAST_PAUSE, CloudConsole
from infranetes.providers.cloud.guests.kept import KeptConsole
from infranetes.providers.hypervisor import IConsole
from infranetes_common.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable


class CloudConsoleTests(SynchronousTestCase):
    """A console whose guest has written `text`."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.text = b"hello\r\n"
        self.trouble: Exception | None = None
        self.asked = 0
        self.saved = b""
        self.console = CloudConsole(self.clock, "vm-1", KeptConsole(), self.ask, self.save)

    async def ask(self) -> bytes:
        self.asked += 1
        if self.trouble is not None:
            raise self.trouble
        return self.text

    async def save(self, content: bytes) -> None:
        self.saved = content

    def test_it_is_a_console_that_can_be_read_alone(self) -> None:
        self.assertTrue(verifyObject(IConsole, self.console))
        self.assertFalse(self.console.writable)
        failure = self.failureResultOf(self.console.write(b"x"), FailedPrecondition)
        self.assertIn("kubectl exec", str(failure.value))

    def test_nobody_is_asked_while_nobody_reads(self) -> None:
        self.clock.advance(1000)
        self.assertEqual(self.asked, 0)

    def test_who_reads_to_the_end_has_the_cloud_asked_now_and_then(self) -> None:
        self.assertEqual(self.successResultOf(self.console.read(0, 100)), b"hello\r\n")
        self.assertEqual(self.successResultOf(self.console.read(2, 3)), b"llo")
        self.assertEqual(self.successResultOf(self.console.read(7, 100)), b"")
        self.assertEqual(self.asked, 1)
        self.text += b"more"
        self.clock.advance(FIRST_PAUSE)
        self.assertEqual(self.successResultOf(self.console.read(7, 100)), b"more")
        self.assertEqual(self.asked, 2)

    def test_what_is_not_kept_is_refused(self) -> None:
        self.successResultOf(self.console.read(0, 1))
        for offset, size in ((-1, 1), (0, -1), (1000, 1)):
            self.failureResultOf(self.console.read(offset, size), InvalidArgument)

    def test_a_cloud_that_refuses_looks_is_asked_more_rarely_still(self) -> None:
        often, rarely = self.asked_in_an_hour(1.0), self.asked_in_an_hour(4.0)
        self.assertLess(rarely, often / 3)
        self.assertGreaterEqual(rarely, 3600 // (4 * LAST_PAUSE))

    def asked_in_an_hour(self, stretch: float) -> int:
        """Return how often the cloud is asked for a console to which nothing is written."""
        console = CloudConsole(self.clock, "vm-1", KeptConsole(), self.ask, self.save, lambda: stretch)
        console.changed()
        self.clock.advance(0)
        console.changed()
        self.asked = 0
        for _ in range(3600):
            self.clock.advance(1)
        console.stop()
        return self.asked

    def test_who_waits_has_it_asked_ever_more_rarely(self) -> None:
        waiting = self.console.changed()
        self.clock.advance(0)
        self.successResultOf(waiting)
        waiting = self.console.changed()
        for _ in range(600):
            self.clock.advance(1)
        self.assertNoResult(waiting)
        self.assertLess(self.asked, 25)
        self.assertGreaterEqual(self.asked, 600 // LAST_PAUSE)
        self.text += b"more"
        self.clock.advance(LAST_PAUSE)
        self.successResultOf(waiting)
        asked = self.asked
        self.clock.advance(1000)
        self.assertEqual(self.asked, asked, "nobody waits any more")

    def test_trouble_at_the_cloud_is_not_the_readers(self) -> None:
        self.trouble = Unavailable("the cloud is away")
        self.assertEqual(self.successResultOf(self.console.read(0, 100)), b"")
        waiting = self.console.changed()
        self.clock.advance(FIRST_PAUSE)
        self.clock.advance(FIRST_PAUSE)
        self.trouble = None
        self.clock.advance(LAST_PAUSE)
        self.successResultOf(waiting)
        self.assertEqual(self.successResultOf(self.console.read(0, 100)), b"hello\r\n")

    def test_a_later_daemons_begins_with_what_was_kept(self) -> None:
        self.successResultOf(self.console.read(0, 1))
        again = CloudConsole(self.clock, "vm-1", KeptConsole.of(self.saved), self.ask, self.save)
        self.assertEqual((again.begin, again.end), (0, 7))
        self.assertEqual(self.successResultOf(again.read(7, 100)), b"")

    def test_when_it_ends_nothing_more_comes(self) -> None:
        self.successResultOf(self.console.read(0, 1))
        waiting = self.console.changed()
        self.console.finish()
        self.successResultOf(waiting)
        self.text += b"more"
        self.clock.advance(1000)
        self.assertEqual(self.successResultOf(self.console.read(7, 100)), b"")
        later = self.console.changed()
        self.clock.advance(0)
        self.successResultOf(later)
        self.assertEqual((self.console.ended, self.asked), (True, 1))

    def test_of_a_vm_that_is_destroyed_nothing_can_be_read(self) -> None:
        self.console.destroy()
        self.failureResultOf(self.console.read(0, 1), NotFound)
        self.failureResultOf(self.console.write(b"x"), NotFound)
