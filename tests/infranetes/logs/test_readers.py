# SPDX-License-Identifier: Apache-2.0
"""What others read in a container's log on the node, by their own rules: each line once, also the last one.

The rules are those of Fluent Bit's multiline parser `cri`, of Vector's source `kubernetes_logs`, of
Promtail's stage `cri`, of the OpenTelemetry collector's operator `container`, and of kubelet itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from hypothesis import example, given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from infranetes.logs import render
from infranetes_common.concurrency import start
from infranetes_common.wire import vmserver
from tests.infranetes.logs.log_scenario import record
from vmserver.rpc.last_lines import Records, whole

Lines = list[tuple[str, bytes]]  # the stream, and the text
Written = list[tuple[int, bytes]]  # what a container has written to 0, stdout, or to 1, stderr

FLUENT_BIT = re.compile(rb"^(?P<time>.+?) (?P<stream>stdout|stderr) (?P<tag>F|P) (?P<text>.*)$")
PROMTAIL = re.compile(rb"(?s)^(?P<time>\S+?) (?P<stream>stdout|stderr) (?P<tag>\S+?) (?P<text>.*)$")
OTEL = re.compile(rb"^(?P<time>[^ ^Z]+Z) (?P<stream>stdout|stderr) (?P<tag>[^ ]*) ?(?P<text>.*)$")
CONTENT = st.lists(st.sampled_from([b"a", b"\n", b"x stderr F y", b"\n\n", b"x" * 15_000]), max_size=4).map(
    b"".join
)


class Reader:
    """Joins parts until one that is no part. :ivar waiting: the lines of which it waits for the rest."""

    def __init__(self, parse: Callable[[bytes], tuple[str, bytes, bytes]], trims: bool = False) -> None:
        self._parse = parse
        self._trims = trims
        self.waiting: dict[str, bytes] = {}

    def read(self, log: bytes) -> Lines:
        found = []
        for line in log.split(b"\n")[:-1]:
            stream, tag, text = self._parse(line.rstrip(b" ") if self._trims else line)
            text = self.waiting.pop(stream, b"") + text
            if tag == b"P":
                self.waiting[stream] = text
            else:
                found.append((stream, text))
        return found


def by(pattern: re.Pattern[bytes]) -> Callable[[bytes], tuple[str, bytes, bytes]]:
    """Return a parser of lines that match this."""

    def parse(line: bytes) -> tuple[str, bytes, bytes]:
        match = pattern.match(line)
        assert match is not None, line
        return match["stream"].decode(), match["tag"], match["text"]

    return parse


def vector(line: bytes) -> tuple[str, bytes, bytes]:
    """Vector splits a line at its first three spaces."""
    _, stream, tag, text = line.split(b" ", 3)
    return stream.decode(), tag, text


def readers() -> dict[str, Reader]:
    return {
        "Fluent Bit": Reader(by(FLUENT_BIT)),
        "Vector": Reader(vector),
        "Promtail": Reader(by(PROMTAIL)),
        "OpenTelemetry": Reader(by(OTEL), trims=True),
    }


def kubelet(log: bytes) -> bytes:
    """Return what `kubectl logs` shows, and what is the termination message if that is of the log."""
    shown = b""
    for line in re.findall(rb"[^\n]*\n", log):
        _, _, tag, text = line.split(b" ", 3)
        shown += text[:-1] if tag == b"P" else text
    return shown


def records(written: Written) -> list[vmserver.LogRecord]:
    """Return the records of what was written, each stream's last part without an end as such."""
    made = []
    for stream, content in written:
        *lines, last = content.split(b"\n")
        made += [(line, False, stream) for line in lines]
        made += [(last, True, stream)] if last else []
    return [
        record(number, line, partial=partial, stream=stream)
        for number, (line, partial, stream) in enumerate(made, 1)
    ]


def log_of(written: Written) -> bytes:
    """Return the node's log of a container that has written this, and has ended."""

    async def after(cursor: str) -> Records:
        for each in records(written):
            yield each

    async def rendered() -> bytes:
        return b"".join([render(each) async for each in whole(after, "", True)])

    log: bytes = SynchronousTestCase().successResultOf(start(rendered()))
    return log


class ReaderTests(SynchronousTestCase):
    @given(st.lists(st.tuples(st.integers(0, 1), CONTENT), max_size=4))
    @example([(0, b"one\nlast words")])
    @example([(0, b"out"), (1, b"err")])
    @example([(1, b"x" * 40_000)])
    @example([(0, b"a"), (0, b"\n")])
    def test_each_line_is_read_once_and_nothing_is_waited_for(self, written: Written) -> None:
        log = log_of(written)
        for name, reader in readers().items():
            read = reader.read(log)
            for number, stream in enumerate(("stdout", "stderr")):
                output = b"".join(content for of, content in written if of == number)
                lines = output.removesuffix(b"\n").split(b"\n") if output else []
                self.assertEqual([text for of, text in read if of == stream], lines, name)
            self.assertEqual(reader.waiting, {}, name)
            self.assertEqual(kubelet(log).count(b"\n"), len(read))
