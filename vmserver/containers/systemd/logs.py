"""A container's log: the entries that its logger sent to the journal, as LogRecords."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

from twisted.internet.defer import Deferred

from infranetes_common import vmserver as messages
from infranetes_common.errors import InvalidArgument
from vmserver.containers.journal import CURSOR, Journal

# A follower whose container is over waits at most so long for the entry that says that it was the last.
LAST_SECONDS = 5.0
SPAWN_SECONDS = 1.0
# systemd's sd-messages.h: SD_MESSAGE_SPAWN_FAILED
SPAWN_FAILED = "641257651c1b4ec9a8624d7a40a9e1e7"

_CURSOR = re.compile(rf"1\.([0-9]{{1,18}})\.({CURSOR})", re.ASCII)
_FIELDS = ("MESSAGE", "INFRANETES_NUMBER", "INFRANETES_TIME", "INFRANETES_STREAM", "INFRANETES_PARTIAL",
           "INFRANETES_END")  # fmt: skip


def parse(cursor: str) -> tuple[int, str]:
    """An entry's number and its place in the journal. :raise InvalidArgument: not one of ours."""
    if not cursor:
        return 0, ""
    found = _CURSOR.fullmatch(cursor)
    if found is None:
        raise InvalidArgument("cursor: not one of ours; begin with an empty one")
    return int(found[1]), found[2]


async def records(
    reactor: Any,
    journal: Journal,
    log: str,
    cursor: str,
    follow: bool,
    finished: Deferred[None],
    since: int = 0,
) -> AsyncIterator[Any]:
    """The LogRecords of `log` after `cursor`; with `follow` until it has ended and all is read.

    :param finished: fires when its container has ended; cancelled in the end. Entries reach the journal a
        little later, so if it has fired already they are waited for also without `follow`.
    """
    last, place = parse(cursor)
    waits = follow or finished.called
    # Who sent an entry is the kernel's word: only root can write into another's log.
    matches = [f"INFRANETES_CONTAINER={log}", "_UID=0"]
    reading = journal.open(matches, _FIELDS, place, waits, since)
    timers: list[Any] = []
    over = expired = ended = False

    def is_over(_: Any) -> None:
        nonlocal over
        over = True
        timers.append(reactor.callLater(LAST_SECONDS, expire))
        reading.wake()

    def expire() -> None:
        nonlocal expired
        expired = True
        reading.wake()

    if waits:
        finished.addCallbacks(is_over, lambda failure: None)
    entries = aiter(reading)
    try:
        async for entry in entries:
            if entry is not None and "INFRANETES_END" not in entry:
                number = int(entry.get("INFRANETES_NUMBER", b"0"))
                if entry["__CURSOR"].decode() != place:
                    yield _record(entry, number, number > last + 1)
                last = number
                continue
            ended = ended or entry is not None
            if (ended and (over or not waits)) or expired:
                return
    finally:
        finished.addErrback(lambda failure: None)
        finished.cancel()
        for timer in timers:
            if timer.active():
                timer.cancel()
        await entries.aclose()  # type: ignore[attr-defined]
        await reading.close()


async def spawn_failure(reactor: Any, journal: Journal, unit: str, invocation: bytes) -> str:
    """What systemd says of a unit whose program it could not execute; "": it was executed.

    :param invocation: the unit's InvocationID."""
    matches = [f"MESSAGE_ID={SPAWN_FAILED}", f"UNIT={unit}", f"INVOCATION_ID={bytes(invocation).hex()}"]
    reading = journal.open(matches, ("MESSAGE",), follow=True)
    timer = reactor.callLater(SPAWN_SECONDS, reading.wake)
    entries = aiter(reading)
    try:
        entry = await anext(entries, None)
    finally:
        if timer.active():
            timer.cancel()
        await entries.aclose()  # type: ignore[attr-defined]
        await reading.close()
    said = "" if entry is None else entry.get("MESSAGE", b"").decode(errors="replace")
    return said.partition(": Failed at step ")[2] and said.partition(": ")[2]


def _record(entry: dict[str, bytes], number: int, gap: bool) -> Any:
    error = entry.get("INFRANETES_STREAM") == b"stderr"
    return messages.LogRecord(
        time_nanos=int(entry.get("INFRANETES_TIME", b"0")),
        stream=messages.LogRecord.STDERR if error else messages.LogRecord.STDOUT,
        line=entry.get("MESSAGE", b""),
        partial="INFRANETES_PARTIAL" in entry,
        cursor=f"1.{number}.{entry['__CURSOR'].decode()}",
        gap=gap,
    )
