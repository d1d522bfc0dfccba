# SPDX-License-Identifier: Apache-2.0
"""Commands in one guest, each from its start to its end, and what becomes of one that nobody waits for."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Sequence

from twisted.conch.error import ConchError
from twisted.conch.ssh.common import NS
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime

from infranetes.machines.agentless.local_call import Served
from infranetes.machines.agentless.ssh.channel import CommandChannel
from infranetes.machines.agentless.ssh.connections import Connections, Link
from infranetes.machines.agentless.ssh.shells import Shell, shell_for
from infranetes_common.concurrency import start, within
from infranetes_common.errors import DeadlineExceeded, FailedPrecondition, Unavailable

BEGIN_SECONDS = 30.0  # until a server has begun a command
KILL_SECONDS = 30.0  # for killing what a command has left


class Commands:
    """Runs commands in one guest over SSH.

    :param sudo: they run as root by sudo.
    """

    def __init__(self, reactor: IReactorTime, connections: Connections, sudo: bool) -> None:
        self._reactor = reactor
        self._connections = connections
        self._sudo = sudo
        self._killing: set[Deferred[None]] = set()

    async def shell(self) -> Shell:
        """Return the guest's shell. Connects if there is no connection."""
        return shell_for(await self._connections.server(), self._sudo)

    @contextlib.asynccontextmanager
    async def running(self, command: Sequence[str], term: str = "") -> AsyncIterator[CommandChannel]:
        """Run a command during the block; one that has not ended then is killed, with what it has started.

        :param command: empty: the login shell. :param term: the type of its terminal; "": it has none."""
        mark = secrets.token_hex(8)
        async with self._channel() as (link, channel):
            shell = self._shell(link)
            try:
                line = shell.line(command, mark)
                if term:
                    await self._consent(channel, channel.open_terminal(term), "a terminal")
                await self._execute(channel, line)
                yield channel
            finally:
                if channel.runs and link.is_live:
                    channel.kill()
                    self._kill(shell.kill(mark))

    async def run_line(self, line: Callable[[Shell], str]) -> tuple[Shell, int]:
        """Run a line of a shell's, without a command's bounds; return its exit code."""
        async with self._channel() as (link, channel):
            shell = self._shell(link)
            await self._execute(channel, line(shell))
            await channel.end_stdin()
            async for _ in channel:
                pass
            return shell, channel.exit_code()

    def close(self) -> None:
        """Kill nothing more."""
        for kill in list(self._killing):
            kill.cancel()

    @contextlib.asynccontextmanager
    async def _channel(self) -> AsyncIterator[tuple[Link, CommandChannel]]:
        link, channel = await self._connections.open()
        try:
            yield link, channel
        finally:
            channel.close()

    def _shell(self, link: Link) -> Shell:
        return shell_for(link.transport.server, self._sudo)

    async def _execute(self, channel: CommandChannel, line: str) -> None:
        encoded = line.encode(errors="surrogateescape")
        await self._consent(channel, channel.request(b"exec", NS(encoded)), "a command")

    async def _consent(self, channel: CommandChannel, answer: Deferred[object], what: str) -> None:
        """Wait for the server's consent to what was asked for."""
        try:
            await within(self._reactor, BEGIN_SECONDS, answer, f"its SSH server's answer to {what}")
        except ConchError:
            raise channel.lost or FailedPrecondition(f"its SSH server refuses {what}") from None
        except DeadlineExceeded as error:
            raise Unavailable(str(error)) from None

    def _kill(self, line: str) -> None:
        if line:
            killing = start(self._killed(line))
            self._killing.add(killing)
            killing.addBoth(lambda _: self._killing.discard(killing))

    async def _killed(self, line: str) -> None:
        await within(self._reactor, KILL_SECONDS, self.run_line(lambda _: line), "")


async def collected(channel: CommandChannel, max_output: int, stdin: bytes) -> tuple[bytes, bytes]:
    """Return a command's stdout and stderr, `max_output` bytes of each; the rest is read and dropped."""
    streams = {"stdout": bytearray(), "stderr": bytearray()}
    feeding = start(_feed_all(channel, stdin))
    try:
        async for stream, data in channel:
            into = streams[stream]
            into += data[: max(0, max_output - len(into))]
    finally:
        _stop(feeding)
    return bytes(streams["stdout"]), bytes(streams["stderr"])


async def relayed(channel: CommandChannel, served: Served) -> int:
    """Relay a session between its client and its command; return the exit code."""
    feeding = start(_feed(channel, served))
    try:
        async for stream, data in channel:
            await served.write(stream, data)
    finally:
        _stop(feeding)
    return channel.exit_code()


def _stop(feeding: Deferred[None]) -> None:
    feeding.addErrback(
        lambda _: None
    )  # what ends the command's input ends its output too, which is waited for
    feeding.cancel()


async def _feed_all(channel: CommandChannel, stdin: bytes) -> None:
    await channel.write_stdin(stdin)
    await channel.end_stdin()


async def _feed(channel: CommandChannel, served: Served) -> None:
    stdin = served.start.stdin
    if not stdin and not channel.tty:
        await channel.end_stdin()
    while (request := await served.read()) is not None:
        if request.WhichOneof("input") == "resize":
            channel.resize(request.resize.width, request.resize.height)
        elif stdin:
            await channel.write_stdin(request.stdin)
    if stdin:
        await channel.end_stdin()
