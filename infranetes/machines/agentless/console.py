# SPDX-License-Identifier: Apache-2.0
"""The serial console of a guest: its container's log, and what one attaches to.

A cursor of the log is the number of the console's byte that follows it, so a later daemon goes on where an
earlier one was killed. A line that has no end yet, such as a prompt, is told once nothing has been added to
it for a while.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable

from twisted.internet.interfaces import IReactorTime

from infranetes.machines.agentless.local_call import LocalCall, Served
from infranetes.machines.sessions import SessionCall
from infranetes.providers.hypervisor import GuestState, GuestStatus, IConsole, IHypervisor
from infranetes_common.concurrency import Notifier, start, within
from infranetes_common.cri_log import lines_of
from infranetes_common.errors import DeadlineExceeded, InfranetesError, InvalidArgument, NotFound
from infranetes_common.reactors import IReactor
from infranetes_common.wire import vmserver

CHUNK_BYTES = 64 * 1024
LINE_BYTES = 16 * 1024  # longer lines are told in parts
MOST_LINES = 1000  # in one record, whose text so has 60 KiB at most
TYPED_BYTES = (
    4096  # that are typed at once, so that several who paste much don't fill what waits for the guest
)
QUIET_SECONDS = 1.0  # after which a line without an end is told as it is
SHOWN_BYTES = 8 * 1024  # of what was written before somebody attached
_OVER = (GuestState.OFF, GuestState.CRASHED)


class Lines:
    """Cuts a console's bytes into records of a log, of many lines each: as `text`.

    :param offset: the number of the first byte."""

    def __init__(self, offset: int) -> None:
        self.offset = offset  # of the first byte that is not in a record
        self._rest = b""

    @property
    def end(self) -> int:
        """The number of the byte that is to be fed next."""
        return self.offset + len(self._rest)

    @property
    def pending(self) -> bool:
        """Whether there is a line without an end."""
        return bool(self._rest)

    def feed(self, data: bytes, now: int) -> list[vmserver.LogRecord]:
        """Add bytes; return the lines that are whole now. :param now: nanoseconds since 1970 UTC."""
        data = self._rest + data
        at, records = 0, []
        while end := _end_of_lines(data, at):
            records.append(self._record(data[at:end], now, partial=not data.endswith(b"\n", at, end)))
            at = end
        self._rest = data[at:]
        return records

    def flush(self, now: int) -> list[vmserver.LogRecord]:
        """Return the line without an end, if there is one."""
        rest, self._rest = self._rest, b""
        return [self._record(rest, now, partial=True)] if rest else []

    def _record(self, lines: bytes, now: int, *, partial: bool) -> vmserver.LogRecord:
        self.offset += len(lines)
        if not partial:
            lines = lines[:-1].replace(b"\r\n", b"\n").removesuffix(b"\r")
        text = lines_of(vmserver.LogRecord(time_nanos=now, line=lines, partial=partial))
        return vmserver.LogRecord(text=text, cursor=str(self.offset))


def _end_of_lines(data: bytes, at: int) -> int:
    """Return where the lines end that are one record from `at` on; 0: there is no whole one.

    A guest may write nothing but newlines, each of which is forty bytes in the log."""
    limit = at + LINE_BYTES
    if data.count(b"\n", at, limit) > MOST_LINES:
        return min(len(data), limit) - len(data[at:limit].split(b"\n", MOST_LINES)[-1])
    return data.rfind(b"\n", at, limit) + 1 or (limit if len(data) >= limit else 0)


class ConsoleReader:
    """Reads a console from a byte on, until the guest has ended and all of it is read.

    :ivar skipped: how many bytes were no longer kept when they were to be read."""

    def __init__(self, clock: IReactorTime, hypervisor: IHypervisor, offset: int) -> None:
        self.offset = offset
        self.skipped = 0
        self._clock = clock
        self._hypervisor = hypervisor
        self._console: IConsole = hypervisor.console
        self._changed = Notifier()
        self._over = False

    async def read(self) -> bytes:
        """Return the next bytes; b"": there are none now."""
        if self.offset < self._console.begin:
            self.skipped += self._console.begin - self.offset
            self.offset = self._console.begin
        try:
            data = await self._console.read(self.offset, CHUNK_BYTES)
        except InvalidArgument:
            if self.offset < self._console.begin:  # it was trimmed meanwhile
                return await self.read()
            self.offset = self._console.end  # it is another console, such as of a VM made anew
            return b""
        self.offset += len(data)
        return data

    @property
    def at_end(self) -> bool:
        """Whether no more bytes will come."""
        return (self._over or self._console.ended) and self.offset >= self._console.end

    async def wait(self, seconds: float | None) -> bool:
        """Wait for more, or for the guest's end. Return whether that came in time; None: however long."""
        changed = self._changed.wait()
        unwatch = self._hypervisor.watch(self._status_changed)
        more = self._console.changed()
        more.addCallbacks(lambda _: self._changed.notify(), lambda _: None)
        try:
            try:
                self._over = (await self._hypervisor.status()).state in _OVER
            except NotFound:
                self._over = True
            if self._over or self._console.ended or self._console.end > self.offset:
                return True
            if seconds is None:
                await changed
            else:
                await within(self._clock, seconds, changed, "the console")
        except DeadlineExceeded:
            return False
        finally:
            unwatch()
            more.cancel()
            changed.addErrback(lambda _: None)
            changed.cancel()
        return True

    def _status_changed(self, status: GuestStatus) -> None:
        self._changed.notify()


class ConsoleCalls:
    """The part of `IAgent` for the console."""

    def __init__(self, reactor: IReactor, hypervisor: Callable[[], IHypervisor]) -> None:
        self._clock: IReactorTime = reactor
        self._machine = hypervisor

    async def read_log(
        self, container_id: str, cursor: str, follow: bool
    ) -> AsyncGenerator[vmserver.LogRecord, None]:
        if cursor and not (cursor.isascii() and cursor.isdecimal() and len(cursor) < 20):
            raise InvalidArgument(f"{cursor[:80]!r} is no place in the console's log")
        reader = ConsoleReader(self._clock, self._machine(), int(cursor or 0))
        async for record in _records(self._clock, reader, follow):
            yield record

    def attach(self) -> SessionCall:
        return LocalCall(self._clock, self._attached)

    async def _attached(self, served: Served) -> int:
        """Show a console, with its last lines first, and type what comes, until the guest's end."""
        typing = start(self._typed(served))
        typing.addErrback(lambda _: None)
        try:
            machine = self._machine()
            console: IConsole = machine.console
            reader = ConsoleReader(self._clock, machine, await self._shown_from(console))
            while True:
                skipped = reader.skipped
                data = await reader.read()
                if reader.skipped > skipped:
                    lost = f"\r\n[{reader.skipped - skipped} bytes of the console were too fast for this]\r\n"
                    await served.write("stdout", lost.encode())
                if data:
                    await served.write("stdout", data)
                elif reader.at_end:
                    return (await machine.status()).exit_code & 0xFF
                else:
                    await reader.wait(None)
        finally:
            typing.cancel()

    async def _shown_from(self, console: IConsole) -> int:
        """Return where to begin: what was written last, from the beginning of a line on."""
        first = max(console.begin, console.end - SHOWN_BYTES)
        shown = await console.read(first, SHOWN_BYTES)
        if first > console.begin and (end := shown.find(b"\n")) >= 0:
            first += end + 1
        return first

    async def _typed(self, served: Served) -> None:
        """Type what comes. Who can't be obeyed is told, once for each reason."""
        last_error = ""
        while (message := await served.read()) is not None:
            data = message.stdin  # none, if it is a terminal's size, which a console does not have
            try:
                for at in range(0, len(data), TYPED_BYTES):
                    await self._machine().console.write(data[at : at + TYPED_BYTES])
            except InfranetesError as error:
                if str(error) != last_error:
                    last_error = str(error)
                    await served.write("stdout", f"\r\n[{last_error}]\r\n".encode())


async def _records(
    clock: IReactorTime, reader: ConsoleReader, follow: bool
) -> AsyncIterator[vmserver.LogRecord]:
    lines = Lines(reader.offset)
    while True:
        skipped = reader.skipped
        data = await reader.read()
        now = int(clock.seconds() * 1e9)
        gap = reader.skipped > skipped or reader.offset - len(data) != lines.end
        if gap:
            for record in lines.flush(now):
                yield record
            lines = Lines(reader.offset - len(data))
        for record in lines.feed(data, now):
            record.gap, gap = gap, False
            yield record
        if data:
            continue
        over = reader.at_end or not follow
        if not over and await reader.wait(QUIET_SECONDS if lines.pending else None):
            if not reader.at_end:
                continue
            over = True
        for record in lines.flush(now):
            yield record
        if over:
            return
