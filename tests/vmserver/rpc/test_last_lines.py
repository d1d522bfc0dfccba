# SPDX-License-Identifier: Apache-2.0
"""A container that ends without a newline has ended its line."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.concurrency import start
from infranetes_common.cri_log import render
from infranetes_common.errors import InvalidArgument
from infranetes_common.wire import vmserver as messages
from vmserver.rpc.last_lines import Records, whole

PARTS = st.lists(st.tuples(st.sampled_from([0, 1]), st.booleans()), max_size=8)


class LastLineTests(SynchronousTestCase):
    def log(self, *parts: tuple[int, bool]) -> list[messages.LogRecord]:
        """Return the records of parts: of a stream, and whether its line goes on."""
        return [
            messages.LogRecord(
                stream=messages.LogRecord.STDERR if stream else messages.LogRecord.STDOUT,
                partial=partial,
                line=b"%d" % number,
                time_nanos=100 + number,
                cursor=f"1.{number}",
            )
            for number, (stream, partial) in enumerate(parts, 1)
        ]

    def read(
        self, log: list[messages.LogRecord], cursor: str = "", follow: bool = True
    ) -> list[messages.LogRecord]:
        """Return the records after a cursor, as an agent sends them."""

        async def after(inner: str) -> Records:
            for record in log[int(inner.partition(".")[2] or 0) :]:
                copy = messages.LogRecord()
                copy.CopyFrom(record)
                yield copy

        async def gather() -> list[messages.LogRecord]:
            return [record async for record in whole(after, cursor, follow)]

        return self.successResultOf(start(gather()))

    def test_each_stream_whose_last_line_goes_on_gets_its_end(self) -> None:
        found = self.read(self.log((0, False), (1, True), (0, True), (0, True)))
        self.assertEqual([record.line for record in found], [b"1", b"2", b"3", b"4", b"", b""])
        self.assertEqual([(each.stream, each.partial) for each in found[4:]], [(0, False), (1, False)])
        self.assertEqual([each.time_nanos for each in found[4:]], [104, 102])

    def test_lines_that_have_ended_get_none(self) -> None:
        log = self.log((0, True), (1, True), (1, False), (0, False))
        self.assertEqual([each.line for each in self.read(log)], [b"1", b"2", b"3", b"4"])
        self.assertEqual(self.read([]), [])

    def test_while_the_container_may_write_more_nothing_is_ended(self) -> None:
        self.assertEqual(len(self.read(self.log((0, True)), follow=False)), 1)

    def test_records_without_a_part_keep_their_cursors(self) -> None:
        found = self.read(self.log((0, False), (0, True), (0, False), (1, False)))
        self.assertEqual([each.cursor for each in found], ["1.1", "1.2+0:102", "1.3", "1.4"])

    @given(PARTS)
    def test_whoever_reads_on_from_any_cursor_gets_the_same_records(
        self, parts: list[tuple[int, bool]]
    ) -> None:
        log = self.log(*parts)
        found = self.read(log)
        for number, record in enumerate(found, 1):
            self.assertEqual(self.read(log, record.cursor), found[number:])
        self.assertFalse({each.stream for each in found} - {e.stream for e in found if not e.partial})

    @given(PARTS, st.integers(1, 4))
    def test_of_many_lines_as_one_record_the_same_ones_end(
        self, parts: list[tuple[int, bool]], together: int
    ) -> None:
        each = self.log(*parts)
        many = [
            messages.LogRecord(
                text=b"".join(render(record) for record in each[at : at + together]),
                cursor=each[min(at + together, len(each)) - 1].cursor,
            )
            for at in range(0, len(each), together)
        ]
        found, wanted = self.read(many), self.read(each)
        self.assertEqual(
            b"".join(render(record) for record in found), b"".join(render(record) for record in wanted)
        )
        self.assertEqual([record.cursor for record in found[-1:]], [record.cursor for record in wanted[-1:]])
        if many:
            self.assertEqual(self.read(each, found[0].cursor), wanted[min(together, len(each)) :])

    def test_what_is_no_cursor_is_refused(self) -> None:
        for cursor in (
            "1.1+",
            "1.1+x",
            "1.1+0:",
            "1.1+0:-1",
            "1.1+0:1+",
            "1.1+0:" + "9" * 20,
            "1.1+\u0663:1",
        ):
            work = start(self._first(cursor))
            self.failureResultOf(work, InvalidArgument)

    async def _first(self, cursor: str) -> None:
        async def none(inner: str) -> Records:
            return
            yield  # makes this a generator

        async for _ in whole(none, cursor, True):
            pass
