# SPDX-License-Identifier: Apache-2.0
"""What the logs that the journal has share: their cursors, and how the reading of one ends."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall

from infranetes_common.errors import InvalidArgument
from vmserver.containers.journal import CURSOR, Entries, Entry

_CURSOR = re.compile(rf"1\.([0-9]{{1,18}})\.({CURSOR})", re.ASCII)


def parse(cursor: str) -> tuple[int, str]:
    """Return the number in a log's cursor, and the journal's cursor of its entry; 0 and "": from the start.

    :raise InvalidArgument: not a cursor of such a log."""
    if not cursor:
        return 0, ""
    match = _CURSOR.fullmatch(cursor)
    if match is None:
        raise InvalidArgument("cursor: not a cursor of this log; begin with an empty one")
    return int(match[1]), match[2]


@asynccontextmanager
async def followed(
    reading: Entries, finished: Deferred[None], timers: Sequence[IDelayedCall]
) -> AsyncIterator[AsyncGenerator[Entry | None, None]]:
    """Iterate over what is read, and end everything with the block.

    :param finished: fires when the container has ended; cancelled in the end. :param timers: likewise."""
    entries = aiter(reading)
    try:
        yield entries
    finally:
        finished.addErrback(lambda failure: None)
        finished.cancel()
        for timer in timers:
            if timer.active():
                timer.cancel()
        await entries.aclose()
        await reading.close()
