# SPDX-License-Identifier: Apache-2.0
"""systemd's journal is read through journalctl."""

from __future__ import annotations

import struct
from functools import partial
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase, TestCase

from infranetes_common.concurrency import sleep, start
from infranetes_common.errors import Unavailable
from infranetes_common.reactors import installed
from tests.support.peak import peak
from vmserver.containers.journal import HELD_BYTES, MAX_VALUE, Entries, Entry, ExportParser, Journal

ENTRIES = st.lists(
    st.dictionaries(st.sampled_from(["MESSAGE", "A", "B_1"]), st.binary(max_size=40), min_size=1), max_size=5
)


class ExportTests(SynchronousTestCase):
    """The journal's export format."""

    @given(ENTRIES, st.integers(1, 40))
    def test_cut_anywhere_it_is_the_same(self, entries: list[dict[str, bytes]], size: int) -> None:
        wire = b""
        for entry in entries:
            for name, value in entry.items():
                if b"\n" in value or len(value) % 2:
                    wire += name.encode() + b"\n" + struct.pack("<Q", len(value)) + value + b"\n"
                else:
                    wire += name.encode() + b"=" + value + b"\n"
            wire += b"\n"
        parser = ExportParser()
        found = [one for at in range(0, len(wire), size) for one in parser.feed(wire[at : at + size])]
        self.assertEqual(found, entries)

    def test_another_format_is_refused(self) -> None:
        for wire in (b"lower=1\n", b"A" * 65 + b"=1\n", b"x" * 2 * MAX_VALUE):
            with self.assertRaises(ValueError):
                ExportParser().feed(wire)

    def test_of_a_long_field_the_beginning_is_kept_and_what_follows_is_read(self) -> None:
        """Whoever may write to the journal can write hundreds of MiB at once."""
        size = 8 * MAX_VALUE + 5
        for count in (MAX_VALUE - 1, MAX_VALUE, MAX_VALUE + 1, size):
            text = b"MESSAGE=" + b"a" * count + b"\n"
            binary = b"MESSAGE\n" + struct.pack("<Q", count) + b"a" * count + b"\n"
            for long in (text, binary):
                wire = long + b"B=1\n\nA=2\n\n"
                read: list[Entry] = []
                self.assertLess(peak(partial(self.feed, wire, read)), 5 * MAX_VALUE)
                kept = min(count, MAX_VALUE)
                self.assertEqual(read, [{"MESSAGE": b"a" * kept, "B": b"1"}, {"A": b"2"}])

    def feed(self, wire: bytes, read: list[Entry]) -> None:
        parser = ExportParser()
        for at in range(0, len(wire), 65536):
            read += parser.feed(wire[at : at + 65536])


class EntriesTests(TestCase):
    """With a script in place of journalctl."""

    def reading(self, script: str) -> Entries:
        program = Path(self.mktemp()).absolute()
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        entries = Journal(installed(), str(program)).open((), ())
        self.addCleanup(lambda: start(entries.close()))
        return entries

    async def test_woken_before_it_waits_it_yields_none(self) -> None:
        entries = self.reading("exec sleep 600")
        entries.wake()
        self.assertIsNone(await anext(aiter(entries)))

    async def test_of_large_entries_few_wait_until_they_are_read(self) -> None:
        entries = self.reading("while printf MESSAGE=%0500000d 1; do printf '\\n\\n'; done")
        reading = aiter(entries)
        for _ in range(20):
            self.assertEqual(len((await anext(reading) or {})["MESSAGE"]), 500_000)
            self.assertLess(entries.held, HELD_BYTES + 2 * MAX_VALUE)
            await sleep(installed(), 0.01)

    async def test_what_comes_after_a_reader_is_closed_is_not_waited_for(self) -> None:
        """It was paused again by what was still in the pipe, and its end never seen."""
        entries = self.reading("while printf MESSAGE=%0500000d 1; do printf '\\n\\n'; done")
        self.assertIsNotNone(await anext(aiter(entries)))
        while entries.held <= HELD_BYTES:
            await sleep(installed(), 0.01)
        closing = start(entries.close())
        entries._reader.childDataReceived(1, b"MESSAGE=late\n\n")
        await closing.addTimeout(30, installed())

    async def test_a_part_of_an_entry_is_not_yielded(self) -> None:
        entries = self.reading("printf MESSAGE=; sleep 0.3; printf 'a\\n\\n'; exec sleep 600")
        self.assertEqual(await anext(aiter(entries)), {"MESSAGE": b"a"})

    async def test_a_journalctl_that_does_not_end_by_itself_has_failed(self) -> None:
        """So that what it has not said is not taken for what is not there."""
        for script, words in (
            ("kill -KILL $$", "was killed by SIGKILL"),
            ("echo no disk >&2; exit 3", "ended with exit code 3: no disk"),
        ):
            with self.assertRaises(Unavailable) as caught:
                await anext(aiter(self.reading(script)))
            self.assertIn(words, str(caught.exception))
