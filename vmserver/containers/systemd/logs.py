# SPDX-License-Identifier: Apache-2.0
"""A container's log: the journal entries of its logger, as LogRecords."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime

from infranetes_common.wire import vmserver as messages
from vmserver.containers.journal import BATCH, Entry, Journal
from vmserver.containers.journal_logs import followed, parse
from vmserver.containers.log_lines import packed

LAST_SECONDS = 5.0  # after the container's end, without an entry, until the marked last one is given up
SPAWN_SECONDS = 1.0
# systemd's sd-messages.h: SD_MESSAGE_SPAWN_FAILED
SPAWN_FAILED = "641257651c1b4ec9a8624d7a40a9e1e7"

_FIELDS = ("MESSAGE", "INFRANETES_NUMBER", "INFRANETES_TIME", "INFRANETES_STREAM", "INFRANETES_PARTIAL",
           "INFRANETES_END")  # fmt: skip


async def records(
    reactor: IReactorTime,
    journal: Journal,
    log: str,
    cursor: str,
    follow: bool,
    finished: Deferred[None],
    since: int = 0,
    text: bool = False,
) -> AsyncGenerator[messages.LogRecord, None]:
    """Iterate over the LogRecords of `log` after `cursor`; with `follow`, until it has ended.

    :param finished: fires when the container has ended; cancelled in the end. Entries reach the journal a
        little later: if `finished` has fired already, this waits for them even without `follow`.
    """
    last, position = parse(cursor)
    waits = follow or finished.called
    # The kernel supplies the writer's _UID, so that no container can write to another's log.
    matches = [f"INFRANETES_CONTAINER={log}", "_UID=0"]
    reading = journal.open(matches, _FIELDS, position, waits, since)
    timers: list[IDelayedCall] = []
    over = expired = ended = False

    def is_over(_: None) -> None:
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
    batch: list[messages.LogRecord] = []
    async with followed(reading, finished, timers) as entries:
        async for entry in entries:
            for timer in timers if entry is not None else ():
                if timer.active():
                    timer.reset(LAST_SECONDS)
            if entry is not None and "INFRANETES_END" not in entry:
                number = int(entry.get("INFRANETES_NUMBER", b"0"))
                if entry["__CURSOR"].decode() != position:
                    batch.append(_record(entry, number, number > last + 1))
                last = number
                if text and reading.more and len(batch) < BATCH:
                    continue
            for record in packed(batch) if text else batch:
                yield record
            batch = []
            if entry is None or "INFRANETES_END" in entry:
                ended = ended or entry is not None
                if (ended and (over or not waits)) or expired:
                    return


async def spawn_failure(reactor: IReactorTime, journal: Journal, unit: str, invocation: bytes) -> str:
    """Return systemd's reason why it could not execute a unit's program; "" if it was executed.

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
        await entries.aclose()
        await reading.close()
    message = "" if entry is None else entry.get("MESSAGE", b"").decode(errors="replace")
    return message.partition(": Failed at step ")[2] and message.partition(": ")[2]


def _record(entry: Entry, number: int, gap: bool) -> messages.LogRecord:
    error = entry.get("INFRANETES_STREAM") == b"stderr"
    return messages.LogRecord(
        time_nanos=int(entry.get("INFRANETES_TIME", b"0")),
        stream=messages.LogRecord.STDERR if error else messages.LogRecord.STDOUT,
        line=entry.get("MESSAGE", b""),
        partial="INFRANETES_PARTIAL" in entry,
        cursor=f"1.{number}.{entry['__CURSOR'].decode()}",
        gap=gap,
    )
