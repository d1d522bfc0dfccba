"""The machine's journal as a container's log: exact places, and every entry once.

An entry is one or more lines; each line is a LogRecord, or several where it is long. A cursor is the entry's
place in the journal and how many of its records come before: the same entry always has the same records.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

from twisted.internet.defer import Deferred

from infranetes_common import vmserver as messages
from infranetes_common.errors import InvalidArgument
from vmserver.containers.journal import CURSOR, Entry, Journal

PART_BYTES = 16 * 1024
MAX_RECORDS = 10**6
ERRORS = 3  # syslog(3): err and worse go to stderr
SETTLE_SECONDS = 1.0  # after the end, for what the journal takes in still

_CURSOR = re.compile(rf"1\.([0-9]{{1,6}})\.({CURSOR})", re.ASCII)
_FIELDS = ("MESSAGE", "PRIORITY", "SYSLOG_IDENTIFIER", "SYSLOG_PID", "_PID", "_COMM", "_SYSTEMD_UNIT",
           "_TRANSPORT")  # fmt: skip
OWN_UNIT = b"vmserver.service"


def parse(cursor: str) -> tuple[int, str]:
    """Records of an entry that are known, and its place. :raise InvalidArgument: not one of ours."""
    if not cursor:
        return 0, ""
    found = _CURSOR.fullmatch(cursor)
    if found is None:
        raise InvalidArgument("cursor: not one of ours; begin with an empty one")
    return int(found[1]), found[2]


def lines(entry: Entry) -> list[tuple[bytes, bool]]:
    """The lines of an entry, with whether more of the same line follows."""
    who = entry.get("SYSLOG_IDENTIFIER") or entry.get("_COMM") or entry.get("_TRANSPORT", b"")
    pid = entry.get("SYSLOG_PID") or entry.get("_PID", b"")
    head = who + (b"[" + pid + b"]" if pid else b"") + b": " if who else b""
    found = []
    for line in entry.get("MESSAGE", b"").split(b"\n"):
        whole = head + line
        parts = [whole[at : at + PART_BYTES] for at in range(0, len(whole), PART_BYTES)] or [b""]
        found += [(part, number < len(parts)) for number, part in enumerate(parts, 1)]
    return found[:MAX_RECORDS]


def entry_records(entry: Entry, known: int, gap: bool) -> list[Any]:
    """The LogRecords of an entry after the first `known`."""
    place = entry["__CURSOR"].decode()
    priority = entry.get("PRIORITY", b"6")
    error = priority.isdigit() and int(priority) <= ERRORS
    return [
        messages.LogRecord(
            time_nanos=int(entry.get("__REALTIME_TIMESTAMP", b"0")) * 1000,
            stream=messages.LogRecord.STDERR if error else messages.LogRecord.STDOUT,
            line=line,
            partial=partial,
            cursor=f"1.{number}.{place}",
            gap=gap and number == known + 1,
        )
        for number, (line, partial) in enumerate(lines(entry), 1)
        if number > known
    ]


async def records(
    reactor: Any,
    journal: Journal,
    cursor: str,
    follow: bool,
    finished: Deferred[None],
    since: int = 0,
) -> AsyncIterator[Any]:
    """All LogRecords after `cursor`; with `follow` on until `finished` fires, which is cancelled in the end.

    What the agent itself writes is left out: reading its own log would never come to an end.
    """
    known, place = parse(cursor)
    reading = journal.open((), _FIELDS, place, follow, since)
    over = False
    timers: list[Any] = []

    def settled() -> None:
        nonlocal over
        over = True
        reading.wake()

    if follow:
        finished.addCallbacks(
            lambda _: timers.append(reactor.callLater(SETTLE_SECONDS, settled)), lambda failure: None
        )
    entries = aiter(reading)
    first = bool(place)
    try:
        async for entry in entries:
            if entry is None:
                if over:
                    return
                continue
            again = first and entry["__CURSOR"].decode() == place
            gap, first = first and not again, False
            if entry.get("_SYSTEMD_UNIT") == OWN_UNIT:
                continue
            for record in entry_records(entry, known if again else 0, gap):
                yield record
    finally:
        finished.addErrback(lambda failure: None)
        finished.cancel()
        for timer in timers:
            if timer.active():
                timer.cancel()
        await entries.aclose()  # type: ignore[attr-defined]
        await reading.close()
