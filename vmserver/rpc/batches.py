# SPDX-License-Identifier: Apache-2.0
"""Batches of log records: records that are available together are sent together.

A message of its own costs a frame, a TLS record and a packet: many times what it costs to read a line of a
log.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

from infranetes_common.concurrency import sleep, start
from infranetes_common.wire import vmserver as messages

#: Limits of a batch; the record that reaches either is its last.
MAX_RECORDS = 64
MAX_BYTES = 32 * 1024


async def batches(
    clock: IReactorTime, records: AsyncGenerator[messages.LogRecord, None]
) -> AsyncGenerator[list[messages.LogRecord], None]:
    """Yield records in batches. Never wait with a record in hand. `aclose()` closes `records`.

    The reactor runs other callbacks after each batch.
    """
    coming = start(_next(records))
    try:
        while (record := await coming) is not None:
            batch = [record]
            size = len(record.line) + len(record.text)
            coming = start(_next(records))
            while len(batch) < MAX_RECORDS and size < MAX_BYTES and coming.called:
                # Any: a Deferred's result has no type. A failure is raised only after the records before it
                # were sent.
                if coming.result is None or isinstance(coming.result, Failure):
                    break
                record = await coming
                assert record is not None
                batch.append(record)
                size += len(record.line) + len(record.text)
                coming = start(_next(records))
            try:
                yield batch
                await sleep(clock, 0)
            except BaseException:  # nothing will wait for the coming record
                coming.addErrback(lambda _: None)
                coming.cancel()
                await coming
                raise
    finally:
        await records.aclose()


async def _next(records: AsyncGenerator[messages.LogRecord, None]) -> messages.LogRecord | None:
    return await anext(records, None)
