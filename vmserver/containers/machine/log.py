# SPDX-License-Identifier: Apache-2.0
"""The VM's journal as a container's log, with exact cursors and every entry once.

An entry has one or more lines, each of which becomes a LogRecord, or several if it is long. A cursor is the
journal's cursor of the entry and the number of its records that have been read; the same entry always has the
same records.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from itertools import islice

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall

from infranetes_common.reactors import IReactor
from infranetes_common.wire import vmserver as messages
from vmserver.containers.journal import BATCH, Entry, Journal
from vmserver.containers.journal_logs import followed, parse
from vmserver.containers.log_lines import packed

PART_BYTES = 16 * 1024
MAX_RECORDS = 100_000  # of one entry
MAX_NAME = 256  # bytes of what names the writer before each line
ERRORS = 3  # the priority err of syslog(3); entries of this and more urgent priorities go to stderr
SETTLE_SECONDS = 1.0  # for entries that reach the journal after the container's end

_FIELDS = ("MESSAGE", "PRIORITY", "SYSLOG_IDENTIFIER", "SYSLOG_PID", "_PID", "_COMM", "_SYSTEMD_UNIT",
           "_TRANSPORT")  # fmt: skip
OWN_UNIT = b"vmserver.service"


def lines(entry: Entry) -> Iterator[tuple[bytes, bool]]:
    """Split an entry into lines, and long lines into parts: each with whether more of its line follows.

    One at a time: all of them may take a hundred times what the entry does."""
    return islice(_lines(entry), MAX_RECORDS)


def _lines(entry: Entry) -> Iterator[tuple[bytes, bool]]:
    who = entry.get("SYSLOG_IDENTIFIER") or entry.get("_COMM") or entry.get("_TRANSPORT", b"")
    pid = entry.get("SYSLOG_PID") or entry.get("_PID", b"")
    head = who[:MAX_NAME] + (b"[" + pid[:MAX_NAME] + b"]" if pid else b"") + b": " if who else b""
    message = entry.get("MESSAGE", b"")
    begin = 0
    while begin <= len(message):
        end = message.find(b"\n", begin)
        end = len(message) if end < 0 else end
        whole = head + message[begin:end]
        for at in range(0, len(whole) or 1, PART_BYTES):
            yield whole[at : at + PART_BYTES], at + PART_BYTES < len(whole)
        begin = end + 1


def entry_records(entry: Entry, skip: int, gap: bool) -> Iterator[messages.LogRecord]:
    """Yield the LogRecords of an entry except the first `skip`."""
    position = entry["__CURSOR"].decode()
    priority = entry.get("PRIORITY", b"6")
    error = priority.isdigit() and int(priority) <= ERRORS
    for number, (line, partial) in islice(enumerate(lines(entry), 1), skip, None):
        yield messages.LogRecord(
            time_nanos=int(entry.get("__REALTIME_TIMESTAMP", b"0")) * 1000,
            stream=messages.LogRecord.STDERR if error else messages.LogRecord.STDOUT,
            line=line,
            partial=partial,
            cursor=f"1.{number}.{position}",
            gap=gap and number == skip + 1,
        )


async def records(
    reactor: IReactor,
    journal: Journal,
    cursor: str,
    follow: bool,
    finished: Deferred[None],
    since: int = 0,
    text: bool = False,
) -> AsyncGenerator[messages.LogRecord, None]:
    """Iterate over the LogRecords after `cursor`; with `follow`, continue until `finished` fires.

    The agent's own entries are left out, since reading them would cause more of them. `finished` is cancelled
    in the end.
    """
    read_before, position = parse(cursor)
    reading = journal.open((), _FIELDS, position, follow, since)
    over = False
    timers: list[IDelayedCall] = []

    def settled() -> None:
        nonlocal over
        over = True
        reading.wake()

    if follow:
        finished.addCallbacks(
            lambda _: timers.append(reactor.callLater(SETTLE_SECONDS, settled)), lambda failure: None
        )
    first = bool(position)
    batch: list[messages.LogRecord] = []
    async with followed(reading, finished, timers) as entries:
        async for entry in entries:
            if entry is not None:
                again = first and entry["__CURSOR"].decode() == position
                gap, first = first and not again, False
                if entry.get("_SYSTEMD_UNIT") != OWN_UNIT:
                    for record in entry_records(entry, read_before if again else 0, gap):
                        batch.append(record)
                        if len(batch) >= BATCH:
                            for ready in packed(batch) if text else batch:
                                yield ready
                            batch = []
            if not (text and reading.more):
                for ready in packed(batch) if text else batch:
                    yield ready
                batch = []
            if entry is None and over:
                return
