# SPDX-License-Identifier: Apache-2.0
"""The reader of the CRI's log format, which `render` writes."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

MAX_TEXT = 1 << 20  # the most bytes of a line that is joined from its parts
MAX_WRITTEN = 2 << 20  # the most bytes of the file that are held for the end of their line


@attrs.frozen
class Line:
    """A line of a container's output.

    :ivar time: as it is written; "": the line is not in the CRI's format.
    :ivar stream: stdout or stderr; "" likewise."""

    time: str
    stream: str
    text: bytes


class Parser:
    """Turns a file's bytes, however they are cut, into lines. A line's parts are joined, for each stream."""

    def __init__(self) -> None:
        self._rest = b""
        self._parts: dict[str, Line] = {}

    def feed(self, data: bytes) -> Iterator[Line]:
        """Yield the lines that these bytes complete."""
        begin = 0  # one line at a time: a list of all would be forty times as large as its bytes
        while (end := data.find(b"\n", begin)) >= 0:
            written, self._rest = self._rest + data[begin:end], b""
            begin = end + 1
            if (line := self._line(written)) is not None:
                yield line
        self._rest += data[begin:]
        if len(self._rest) > MAX_WRITTEN:  # no runtime writes this: it is given in pieces
            written, self._rest = self._rest, b""
            if (line := self._line(written)) is not None:
                yield line

    def finish(self) -> Iterator[Line]:
        """Yield the lines that are not complete, and begin anew."""
        if self._rest and (line := self._line(self._rest)) is not None:
            yield line
        yield from self._parts.values()
        self._rest, self._parts = b"", {}

    def _line(self, written: bytes) -> Line | None:
        time, stream, tags, text = [*written.split(b" ", 3), b"", b"", b""][:4]
        tag = tags.partition(b":")[0]
        if stream not in (b"stdout", b"stderr") or tag not in (b"P", b"F"):
            return Line("", "", written)
        name = stream.decode()
        begun = self._parts.pop(name, None)
        line = Line(time.decode("ascii", "replace"), name, text)
        if begun is not None:
            line = attrs.evolve(begun, text=begun.text + text)
        if tag == b"P" and len(line.text) < MAX_TEXT:
            self._parts[name] = line
            return None
        return line
