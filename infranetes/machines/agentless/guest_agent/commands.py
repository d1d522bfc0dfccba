# SPDX-License-Identifier: Apache-2.0
"""Commands in the guest, by guest-exec. Their output comes when they have ended.

On POSIX systems a script goes around each: see `scripts`. The agent has nothing to end a command with, so
another command does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from twisted.internet.defer import CancelledError, Deferred
from twisted.logger import Logger

from infranetes.machines.agentless.guest_agent import answers
from infranetes.machines.agentless.guest_agent.answers import CommandLost, Ended, NotStarted
from infranetes.machines.agentless.guest_agent.connection import AgentConnection
from infranetes.machines.agentless.guest_agent.protocol import Request
from infranetes.machines.agentless.guest_agent.scripts import around, killing
from infranetes_common.concurrency import backoff, start, within
from infranetes_common.errors import InvalidArgument, ResourceExhausted, Unavailable

MAX_STDIN = 4 << 20  # bytes
MAX_ARGUMENTS = 256 * 1024  # bytes of a command
AGENTS_OUTPUT = 16 << 20  # bytes that the agent keeps of each stream
POLLS = 0.03, 1.0  # seconds from one look to the next: the first, and the longest
GROWTH = 1.6
START_SECONDS = 30.0
INPUT_SPEED = 64 * 1024  # bytes a second that an emulated guest that is busy takes at the least
LOST_SECONDS = 60.0  # for which a command is looked for whose agent does not answer
KILL_SECONDS = 60.0
MOST_KILLING = 50  # commands
_ANSWER = 2 * (AGENTS_OUTPUT // 3 * 4) + (1 << 20)  # bytes of a status, with two outputs in base64
_ANSWER_SILENCE, _ANSWER_SECONDS = 180.0, 600.0  # 16 MiB take a minute in an emulated guest

_log = Logger()


class Commands:
    """Runs commands in one guest.

    :param windows: whether the guest is Windows.
    """

    def __init__(self, connection: AgentConnection, windows: Callable[[], Awaitable[bool]]) -> None:
        self._connection = connection
        self._clock = connection.clock
        self._windows = windows
        self._killing: set[Deferred[None]] = set()
        self._way = (0, 0)  # of `around`, that the guest was found to have in a conversation

    async def run(self, command: Sequence[str], max_output: int, stdin: bytes = b"") -> Ended:
        """Run a command to its end. Cancelled, it is killed, with all that it has started.

        :param max_output: bytes kept of each stream. :raise Unavailable: the guest does not answer.
        :raise InvalidArgument: the command is none, or too long. :raise ResourceExhausted: `stdin` is."""
        _check(command)
        if len(stdin) > MAX_STDIN:
            raise ResourceExhausted(
                f"the input has {len(stdin)} bytes, and QEMU's guest agent is sent {MAX_STDIN} at most; use "
                "SSH"
            )
        try:
            pid = await self._start_around(command, stdin)
        except NotStarted as error:
            return Ended(error.exit_code, b"", error.shown[:max_output], truncated=False)
        try:
            return await self._end(pid, max_output)
        except CancelledError:
            self._kill_later(pid)
            raise

    def close(self) -> None:
        """Leave the commands that are being killed as they are. Idempotent."""
        for kill in list(self._killing):
            kill.cancel()

    async def _start_around(self, command: Sequence[str], stdin: bytes) -> int:
        ways = around(command)
        conversation, first = self._way
        if conversation != self._connection.conversations:
            first = 0
        for number in range(first, len(ways) - 1):
            try:
                pid = await self._start(ways[number], stdin)
            except NotStarted:
                continue
            self._way = self._connection.conversations, number
            return pid
        self._way = self._connection.conversations, len(ways) - 1
        return await self._start(ways[-1], stdin)

    async def _start(self, command: Sequence[str], stdin: bytes = b"") -> int:
        program, *words = command
        seconds = START_SECONDS + len(stdin) / INPUT_SPEED
        arguments = {"path": program, "arg": words, "capture-output": True}
        request = Request("guest-exec", arguments, stdin, silence=seconds, total=seconds)
        return await self._connection.ask(
            request, lambda answer: answers.started(answer, program), self._kill_later
        )

    async def _end(self, pid: int, max_output: int) -> Ended:
        pauses = backoff(*POLLS, factor=GROWTH)
        answered = self._clock.seconds()
        while True:
            await self._connection.pause(next(pauses))
            try:
                ended = await self._status(pid, max_output)
            except CommandLost:
                raise
            except Unavailable:
                if self._connection.closed or self._clock.seconds() - answered > LOST_SECONDS:
                    raise
                continue
            answered = self._clock.seconds()
            if ended is not None:
                return ended

    async def _status(self, pid: int, max_output: int) -> Ended | None:
        request = Request(
            "guest-exec-status",
            {"pid": pid},
            most=_ANSWER,
            keep=max_output,
            silence=_ANSWER_SILENCE,
            total=_ANSWER_SECONDS,
        )
        return await self._connection.ask(request, lambda answer: answers.ended(answer, max_output))

    def _kill_later(self, pid: int) -> None:
        if len(self._killing) >= MOST_KILLING:
            _log.warn(
                "{name}: process {pid} is not killed: too many are", name=self._connection.name, pid=pid
            )
            return
        work = start(within(self._clock, KILL_SECONDS, self._kill(pid), "killing it"))
        self._killing.add(work)

        def killed(result: object) -> None:
            self._killing.discard(work)

        work.addErrback(self._not_killed, pid)
        work.addBoth(killed)

    def _not_killed(self, failure: object, pid: int) -> None:
        _log.warn(
            "{name}: process {pid} may go on: {failure}", name=self._connection.name, pid=pid, failure=failure
        )

    async def _kill(self, pid: int) -> None:
        killer = await self._start(killing(pid, await self._windows()))
        await self._end(killer, 0)
        await self._end(pid, 0)  # the agent keeps a command and its output until it has told its end


def _check(command: Sequence[str]) -> None:
    if not command or not command[0]:
        raise InvalidArgument("the command is empty")
    try:
        size = sum(len(argument.encode()) for argument in command)
    except UnicodeEncodeError:
        raise InvalidArgument("the command is no text, which is all that QEMU's guest agent takes") from None
    if any("\0" in argument for argument in command):
        raise InvalidArgument("the command has a NUL, which no program can be given")
    if size > MAX_ARGUMENTS:
        raise InvalidArgument(
            f"argument list too long: {size} bytes, and QEMU's guest agent is sent {MAX_ARGUMENTS} at most; "
            "give it on the standard input"
        )
