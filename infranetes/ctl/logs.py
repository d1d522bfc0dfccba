# SPDX-License-Identifier: Apache-2.0
"""`infranetes-ctl logs`: a container's log, read from the node's own file."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

import attrs

from infranetes.ctl.calls import ASK_SECONDS
from infranetes.ctl.session import DONE, Session
from infranetes.ctl.tables import Json
from infranetes.logs.parse import Line, Parser
from infranetes.logs.reading import LogReader
from infranetes_common.concurrency import run_in_thread, sleep
from infranetes_common.errors import FailedPrecondition, InvalidArgument, NotFound
from infranetes_common.wire import control
from txgrpc import Code, GrpcError

PAUSE_SECONDS = 0.25  # between two reads of a file that is followed
_NANOSECONDS = re.compile(r"(\.[0-9]{6})[0-9]+")  # datetime has microseconds alone
QUIET_READS = 8  # reads without a new byte, after which the daemon is asked whether the container has ended


async def logs(session: Session) -> int:
    """Print the log; with --follow, go on with what is written until the container has ended.

    :raise NotFound: there is no such pod, container or log.
    :raise FailedPrecondition: several containers may be meant, or the log can't be read.
    :raise GrpcError: the daemon does not answer."""
    container = await _container(session)
    if not container.log_path:
        raise FailedPrecondition(f"container {container.name} has no log: kubelet gave it no path")
    reader = await run_in_thread(
        session.reactor, LogReader, Path(container.log_directory), container.log_path
    )
    try:
        printer = _Printer(session, container)
        await _print_all(session, reader, printer)
        if session.options.follow:
            await _follow(session, reader, printer, container.id)
        printer.finish()
    finally:
        reader.close()
    return DONE


async def _container(session: Session) -> control.PodContainer:
    options = session.options
    request = control.DescribePodRequest(pod=options.pod)
    pod = await session.stub.DescribePod(request, timeout=ASK_SECONDS)
    if options.container and options.in_container:
        raise InvalidArgument(f"two containers are named: {options.container} and {options.in_container}")
    name = options.in_container or options.container
    return chosen(list(pod.containers), options.pod, name, previous=options.previous)


def chosen(
    containers: list[control.PodContainer], pod: str, name: str, *, previous: bool = False
) -> control.PodContainer:
    """Return the container that is meant; the newest, if it was made several times.

    :param name: its name, its id or the beginning of it; "": the only one.
    :param previous: that one's predecessor is meant.
    :raise NotFound: there is none. :raise FailedPrecondition: there are several."""
    found = [each for each in containers if not name or each.name == name]
    found = found or [each for each in containers if each.id.startswith(name)]
    names = list(dict.fromkeys(each.name for each in containers))
    if not found:
        if not names:
            raise NotFound(f"pod {pod} has no containers, so there is no log")
        raise NotFound(f"pod {pod} has no container {name}: it has {', '.join(names)}")
    if len({each.name for each in found}) > 1:
        raise FailedPrecondition(f"pod {pod} has several containers: say which of {', '.join(names)}")
    *before, newest = sorted(found, key=lambda each: (each.created_at, each.attempt))
    if not previous:
        return newest
    if not before:
        raise NotFound(
            f"container {newest.name} of pod {pod} has no predecessor here: it was not restarted, or kubelet "
            "has removed that one; without --previous there is its own log"
        )
    return before[-1]


async def _print_all(session: Session, reader: LogReader, printer: _Printer) -> None:
    while data := await run_in_thread(session.reactor, reader.read):
        printer.feed(data)
    printer.begun()


async def _follow(session: Session, reader: LogReader, printer: _Printer, id: str) -> None:
    quiet, ended = 0, False
    while True:
        if data := await run_in_thread(session.reactor, reader.read):
            printer.feed(data)
            quiet = 0
        elif await run_in_thread(session.reactor, reader.turn):
            quiet = 0
        elif ended:  # and all that it wrote has been read
            return
        else:
            await sleep(session.reactor, PAUSE_SECONDS)
            quiet += 1
            if quiet % QUIET_READS == 0:
                ended = await _has_ended(session, id)


async def _has_ended(session: Session, id: str) -> bool:
    """Return whether the container has ended or is gone; False as well if the daemon does not answer."""
    request = control.DescribePodRequest(pod=session.options.pod)
    try:
        pod = await session.stub.DescribePod(request, timeout=ASK_SECONDS)
    except GrpcError as error:
        if error.code in (Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED):
            return False
        if error.code is Code.NOT_FOUND:
            return True
        raise
    found = [each for each in pod.containers if each.id == id]
    return not found or bool(found[0].finished_at)


@attrs.define
class _Printer:
    """Prints lines in the way that the command line asks for.

    :ivar held: the lines that are to be printed together; None: each is printed at once.
    """

    session: Session
    container: control.PodContainer
    parser: Parser = attrs.field(factory=Parser)
    held: deque[Line] | None = None

    def __attrs_post_init__(self) -> None:
        options = self.session.options
        if options.tail is not None or (options.json and not options.follow):
            self.held = deque(maxlen=options.tail)

    def feed(self, data: bytes) -> None:
        """Print or hold the lines in these bytes of the file."""
        self._take(self.parser.feed(data))

    def begun(self) -> None:
        """Print the lines that were held; the file was read to its end."""
        if self.session.options.follow and self.held is not None:
            held, self.held = self.held, None
            self._print(held)

    def finish(self) -> None:
        """Print what is left: the lines that are held, and a last one that is not complete."""
        self._take(self.parser.finish())
        if self.held is None:
            return
        if self.session.options.json:
            told = {"id": self.container.id, "name": self.container.name}
            document = {"container": told, "lines": [_json(line) for line in self.held]}
            self.session.document(document)
        else:
            self._print(self.held)

    def _take(self, lines: Iterable[Line]) -> None:
        since = self.session.options.since
        if since is not None:
            lines = (line for line in lines if is_since(line, since))
        if self.held is None:
            self._print(lines)
        else:
            self.held.extend(lines)

    def _print(self, lines: Iterable[Line]) -> None:
        options = self.session.options
        if options.json:
            shown = [json.dumps(_json(line)) for line in lines]
        else:
            shown = [_text(line, timestamps=options.timestamps) for line in lines]
        if shown:
            self.session.print("\n".join(shown))


def is_since(line: Line, since: float) -> bool:
    """Whether a line was written at that time or later, or nobody knows when.

    :param since: seconds since 1970 UTC."""
    try:
        return datetime.fromisoformat(_NANOSECONDS.sub(r"\1", line.time)).timestamp() >= since
    except ValueError:
        return True


def _text(line: Line, *, timestamps: bool) -> str:
    text = line.text.decode("utf-8", "replace")
    return f"{line.time} {text}" if timestamps and line.time else text


def _json(line: Line) -> Json:
    return {"time": line.time, "stream": line.stream, "text": line.text.decode("utf-8", "replace")}
