# SPDX-License-Identifier: Apache-2.0
"""A guest's serial console is its container's log, and what one attaches to."""

from __future__ import annotations

import time
from typing import Any

from infranetes.machines.agentless.console import CHUNK_BYTES, LINE_BYTES, QUIET_SECONDS, SHOWN_BYTES, Lines
from infranetes.providers.hypervisor import GuestState, GuestStatus
from infranetes_common.concurrency import start
from infranetes_common.errors import FailedPrecondition, InvalidArgument
from infranetes_common.wire import vmserver
from tests.infranetes.machines.agentless.agent_case import ID, AgentCase
from tests.infranetes.machines.agentless.fakes import FakeConsole

OFF = GuestStatus(GuestState.OFF, 5, 9)


def parts(records: list[vmserver.LogRecord]) -> list[tuple[bytes, bool]]:
    """Return the lines in records, as a log has them, and whether each goes on in the next."""
    found = []
    for record in records:
        for line in record.text.splitlines():
            _, stream, tag, content = line.split(b" ", 3)
            assert stream == b"stdout"
            found.append((content, tag == b"P"))
    return found


class ConsoleCase(AgentCase):
    """A guest that runs, and its console."""

    def setUp(self) -> None:
        super().setUp()
        self.run_guest()
        self.console = self.hypervisor.console


class LogTests(ConsoleCase):
    """The console as a log."""

    def follow(self, cursor: str = "", *, follow: bool = True) -> list[vmserver.LogRecord]:
        """Read the log from now on; return the list to which its records are added."""
        records: list[vmserver.LogRecord] = []
        self.reading_ended = False

        async def read() -> None:
            async for record in self.agent.read_log(ID, cursor, follow):
                records.append(record)
            self.reading_ended = True

        self.reading = start(read())
        self.addCleanup(self.reading.addErrback, lambda _: None)
        self.addCleanup(self.reading.cancel)
        return records

    def lines(self, records: list[vmserver.LogRecord]) -> list[bytes]:
        return [line for line, _ in parts(records)]

    def test_lines_come_as_they_are_written(self) -> None:
        records = self.follow()
        self.console.say(b"one\r\ntwo\nthr")
        self.assertEqual(self.lines(records), [b"one", b"two"])
        self.console.say(b"ee\n")
        self.assertEqual(self.lines(records), [b"one", b"two", b"three"])
        self.assertFalse(any(partial for _, partial in parts(records)))

    def test_a_prompt_is_told_once_it_has_stood_for_a_while(self) -> None:
        records = self.follow()
        self.console.say(b"login: ")
        self.assertEqual(records, [])
        self.reactor.advance(QUIET_SECONDS)
        self.assertEqual(parts(records), [(b"login: ", True)])
        self.console.say(b"root\n")
        self.assertEqual(self.lines(records), [b"login: ", b"root"])

    def test_a_long_line_comes_in_parts(self) -> None:
        records = self.follow()
        self.console.say(b"x" * (2 * LINE_BYTES + 5) + b"\n")
        found = [(len(line), partial) for line, partial in parts(records)]
        self.assertEqual(found, [(LINE_BYTES, True), (LINE_BYTES, True), (5, False)])

    def test_a_later_daemon_goes_on_after_any_record(self) -> None:
        said = b"a\nbb\r\n\nlogin: root\n" + b"y" * (LINE_BYTES + 3) + b"\nend\n"
        records = self.follow()
        self.console.say(said)
        for number, record in enumerate(records):
            self.assertEqual(self.lines(self.follow(record.cursor)), self.lines(records[number + 1 :]))

    def test_it_ends_with_the_guest_and_has_its_last_words(self) -> None:
        records = self.follow()
        self.console.say(b"bye\nno newline")
        self.hypervisor.become(OFF)
        self.successResultOf(self.reading)
        self.assertEqual(self.lines(records), [b"bye", b"no newline"])

    def test_it_ends_with_the_vm(self) -> None:
        self.follow()
        self.hypervisor.destroyed = True
        self.console.finish()
        self.assertTrue(self.reading_ended)

    def test_the_log_of_a_guest_that_has_ended_is_read_to_its_end(self) -> None:
        self.console.say(b"one\ntwo\n")
        self.hypervisor.become(OFF)
        self.assertEqual(self.lines(self.follow()), [b"one", b"two"])
        self.assertTrue(self.reading_ended)

    def test_without_following_it_ends_where_the_console_does(self) -> None:
        self.console.say(b"one\ntw")
        self.assertEqual(self.lines(self.follow(follow=False)), [b"one", b"tw"])
        self.assertTrue(self.reading_ended)

    def test_what_is_no_longer_kept_is_told_as_a_gap(self) -> None:
        self.hypervisor.console = self.console = FakeConsole(kept=8)
        self.console.say(b"old lines\nthe\nnew\n")
        records = self.follow("2")
        self.assertEqual((self.lines(records), [one.gap for one in records]), ([b"the", b"new"], [True]))

    def test_what_is_trimmed_while_it_is_read_is_told_as_a_gap(self) -> None:
        self.hypervisor.console = self.console = FakeConsole(kept=8)
        records = self.follow()
        self.console.say(b"ab\ncd")
        self.console.say(b"...\n" * 3 + b"ef\n")
        self.assertEqual(self.lines(records)[0], b"ab")
        self.assertEqual([one.gap for one in records].count(True), 1)
        self.assertEqual(self.lines(records)[-1], b"ef")

    def test_a_cursor_that_is_none_is_refused(self) -> None:
        for cursor in ("-1", "x", "9" * 30, "²"):
            self.follow(cursor)
            self.failureResultOf(self.reading, InvalidArgument)

    def test_a_cursor_of_another_console_begins_at_the_end(self) -> None:
        self.console.say(b"one\n")
        records = self.follow("1000")
        self.console.say(b"two\n")
        self.assertEqual(self.lines(records), [b"two"])

    def test_a_reader_that_leaves_leaves_nothing(self) -> None:
        self.follow()
        self.reading.addErrback(lambda _: None)
        self.reading.cancel()
        self.assertEqual((self.hypervisor.watched, self.reactor.getDelayedCalls()), (0, []))


class LinesTests(ConsoleCase):
    """Cutting bytes into records loses and doubles nothing, however they come."""

    def test_however_they_come(self) -> None:
        said = b"a\r\nb\n\n" + b"z" * (LINE_BYTES + 1) + b"\nlast"
        for size in (1, 2, 3, 7, 1000, len(said)):
            lines, records = Lines(0), []
            for at in range(0, len(said), size):
                records += lines.feed(said[at : at + size], 0)
            records += lines.flush(0)
            joined = b"".join(line + (b"" if partial else b"\n") for line, partial in parts(records))
            self.assertEqual(joined, said.replace(b"\r", b""))
            self.assertEqual(records[-1].cursor, str(len(said)))

    def test_a_flood_of_newlines_takes_little_time_and_no_record_is_too_large(self) -> None:
        lines = Lines(0)
        begun = time.process_time()
        records = lines.feed(b"\n" * CHUNK_BYTES + b"a\n" * CHUNK_BYTES, 0)
        self.assertLess(time.process_time() - begun, 0.5)
        self.assertLessEqual(max(len(one.text) for one in records), 60 * 1024)
        found = parts(records)
        self.assertEqual(found, [(b"", False)] * CHUNK_BYTES + [(b"a", False)] * CHUNK_BYTES)
        self.assertEqual(records[-1].cursor, str(3 * CHUNK_BYTES))


class AttachTests(ConsoleCase):
    """Those who attach to the console."""

    def attached(self) -> tuple[Any, list[bytes]]:
        """Attach; return the call and the list to which what it shows is added."""
        call, shown = self.agent.attach(), []
        self.ended: list[int] = []
        self.do(call.send(vmserver.SessionInput(start=vmserver.SessionStart(id=ID, stdin=True, stdout=True))))

        async def read() -> None:
            async for output in call:
                if output.HasField("end"):
                    self.ended.append(output.end.exit_code)
                else:
                    shown.append(output.stdout)

        reading = start(read())
        reading.addErrback(lambda _: None)
        self.addCleanup(call.cancel)
        return call, shown

    def test_what_was_written_last_is_shown_first(self) -> None:
        self.console.say(b"x" * SHOWN_BYTES + b"\nlogin: ")
        _, shown = self.attached()
        self.console.say(b"root\r\n")
        self.assertEqual(b"".join(shown), b"login: root\r\n")

    def test_what_is_typed_reaches_the_guest(self) -> None:
        call, _ = self.attached()
        self.do(call.send(vmserver.SessionInput(stdin=b"root\r")))
        self.assertEqual(self.console.typed, b"root\r")

    def test_more_is_typed_than_waits_for_a_guest_at_once(self) -> None:
        call, _ = self.attached()
        self.do(call.send(vmserver.SessionInput(stdin=b"x" * 200_000)))
        self.assertEqual(self.console.typed, b"x" * 200_000)
        self.assertLessEqual(max(self.console.sizes), 16 * 1024)

    def test_who_can_t_type_is_told_why_once_and_goes_on_seeing(self) -> None:
        self.console.refusal = FailedPrecondition("the console is read-only")
        call, shown = self.attached()
        for _ in range(3):
            self.do(call.send(vmserver.SessionInput(stdin=b"x")))
        self.console.say(b"on")
        self.assertEqual(b"".join(shown), b"\r\n[the console is read-only]\r\non")
        self.console.refusal = None
        self.do(call.send(vmserver.SessionInput(stdin=b"y")))
        self.assertEqual(self.console.typed, b"y")

    def test_a_terminals_size_is_ignored(self) -> None:
        call, _ = self.attached()
        self.do(call.send(vmserver.SessionInput(resize=vmserver.TerminalSize(width=80, height=24))))
        self.assertEqual(self.console.typed, b"")

    def test_several_see_the_same_and_one_leaves(self) -> None:
        first, one = self.attached()
        _, other = self.attached()
        self.console.say(b"a")
        first.cancel()
        self.console.say(b"b")
        self.assertEqual((one, other), ([b"a"], [b"a", b"b"]))

    def test_it_ends_with_the_guest(self) -> None:
        _, shown = self.attached()
        self.console.say(b"bye")
        self.hypervisor.become(OFF)
        self.assertEqual((shown, self.ended), ([b"bye"], [0]))
        self.assertEqual(self.hypervisor.watched, 0)

    def test_one_who_is_too_slow_is_told_how_much_is_missing(self) -> None:
        self.hypervisor.console = self.console = FakeConsole(kept=100)
        call = self.agent.attach()
        self.addCleanup(call.cancel)
        start_message = vmserver.SessionStart(id=ID, stdout=True)
        self.do(call.send(vmserver.SessionInput(start=start_message)))
        for _ in range(3):
            self.console.say(b"y" * (1 << 19))  # nobody reads

        shown: list[bytes] = []

        async def read() -> None:
            async for output in call:
                shown.append(output.stdout)

        start(read()).addErrback(lambda _: None)
        self.reactor.pump([0.01] * 50)
        self.assertIn(b"too fast for this", b"".join(shown))
