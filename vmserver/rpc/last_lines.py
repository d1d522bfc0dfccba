# SPDX-License-Identifier: Apache-2.0
"""Ends the last line of a container's output.

What a container writes last without a newline comes as a part of a line, since more might follow. Once it
has ended nothing does, and whoever joins the parts of the node's log would wait for the rest for ever. So an
empty record, which is no part, ends the line.

Which lines go on is a part of the cursors, so that whoever reads on from any of them gets the same records:
CURSOR+STREAM:TIME, with the time of the line's last part, for each stream.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Callable

from infranetes_common.cri_log import last_parts
from infranetes_common.errors import InvalidArgument
from infranetes_common.wire import vmserver as messages
from vmserver.containers.jsonlog import parse_time

Records = AsyncGenerator[messages.LogRecord, None]
_STREAMS = {str(int(each)): each for each in (messages.LogRecord.STDOUT, messages.LogRecord.STDERR)}
_OPEN = re.compile(rf"({'|'.join(_STREAMS)}):([0-9]{{1,19}})", re.ASCII)


class OpenLines:
    """The streams whose last record is a part of a line.

    :param cursor: where reading begins; "": at the log's beginning.
    :ivar cursor: the same for whoever wrote the records.
    :raise InvalidArgument: it is no cursor.
    """

    def __init__(self, cursor: str) -> None:
        self.cursor, *parts = cursor.split("+")
        self._times: dict[messages.LogRecord.Stream, int] = {}  # by stream: nanoseconds since 1970
        for part in parts:
            match = _OPEN.fullmatch(part)
            if match is None:
                raise InvalidArgument("cursor: not a cursor of this log; begin with an empty one")
            self._times[_STREAMS[match[1]]] = int(match[2])

    def note(self, record: messages.LogRecord) -> None:
        """Note the next record, and complete its cursor."""
        self.cursor = record.cursor
        if record.text:
            for stream, (time, goes_on) in last_parts(record.text).items():
                self._note(stream, _nanos(time) if goes_on else None)
        else:
            self._note(record.stream, record.time_nanos if record.partial else None)
        if self._times:
            record.cursor = self._complete()

    def _note(self, stream: messages.LogRecord.Stream, time: int | None) -> None:
        """Note the time of the last part of the stream's line; None: the line has ended."""
        if time is not None:
            self._times[stream] = time
        elif self._times:
            self._times.pop(stream, None)

    def ends(self) -> list[messages.LogRecord]:
        """Return the records that end the lines which went on."""
        found = []
        for stream, time in sorted(self._times.items()):
            del self._times[stream]
            found.append(messages.LogRecord(stream=stream, time_nanos=time, cursor=self._complete()))
        return found

    def _complete(self) -> str:
        return self.cursor + "".join(f"+{stream}:{time}" for stream, time in sorted(self._times.items()))


def _nanos(time: bytes) -> int:
    try:
        return parse_time(time.decode("ascii"))
    except ValueError:  # a damaged line, which the node leaves out
        return 0


async def whole(read: Callable[[str], Records], cursor: str, follow: bool) -> Records:
    """Iterate over a log's records. If they are followed, their end is the container's, and all lines end.

    :param read: returns the records after a cursor.
    """
    lines = OpenLines(cursor)
    records = read(lines.cursor)
    try:
        async for record in records:
            lines.note(record)
            yield record
        for record in lines.ends() if follow else ():
            yield record
    finally:
        await records.aclose()
