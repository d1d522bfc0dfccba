# SPDX-License-Identifier: Apache-2.0
"""`IGuestAccess` by QEMU's guest agent, and what else the agent does for a VM."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from twisted.internet.defer import CancelledError, Deferred, DeferredLock
from twisted.internet.interfaces import IStreamClientEndpoint
from zope.interface import implementer

from infranetes.machines.agentless import measuring, placing
from infranetes.machines.agentless.access import GuestFile, IGuestAccess, IPowersOff
from infranetes.machines.agentless.guest_agent import answers
from infranetes.machines.agentless.guest_agent.answers import Ended, GuestCard
from infranetes.machines.agentless.guest_agent.commands import AGENTS_OUTPUT, MAX_STDIN, Commands
from infranetes.machines.agentless.guest_agent.connection import AgentConnection, Unanswered
from infranetes.machines.agentless.guest_agent.protocol import Answer, Request
from infranetes.machines.agentless.local_call import LocalCall, Served
from infranetes.machines.agentless.measuring import Measuring
from infranetes.machines.sessions import SessionCall
from infranetes_common.concurrency import run_in_thread, start, within
from infranetes_common.errors import (
    DeadlineExceeded,
    InvalidArgument,
    NotOffered,
    ResourceExhausted,
)
from infranetes_common.nanoseconds import nanoseconds
from infranetes_common.reactors import IReactor
from infranetes_common.wire import vmserver

FILES_SECONDS = 120.0  # for bringing files
USAGE_SECONDS = 20.0
POWER_SECONDS = 5.0  # for which a refusal to power off is waited for: nothing is answered otherwise
FREEZE_SECONDS = 60.0
MANY_FILES = 200  # of which an archive is made in a thread
CLOCK_NANOS = 5 * 10**9  # by which the guest's clock may differ after it was set

_USER = re.compile(r"[A-Za-z_][A-Za-z0-9._-]{0,63}\$?", re.ASCII)
_KEY = re.compile(r"[ -~]{1,16384}", re.ASCII)  # printable, in one line


@implementer(IGuestAccess, IPowersOff)
class GuestAgentAccess:
    """An `IGuestAccess` over a VM's port for QEMU's guest agent.

    :param endpoint: the port, see `IHypervisor.guest_agent`.
    :param name: of whose VM, for messages: "sandbox 1f2e".
    """

    name = "guest-agent"

    def __init__(self, reactor: IReactor, endpoint: IStreamClientEndpoint, name: str) -> None:
        self._reactor = reactor
        self._connection = AgentConnection(reactor, endpoint, f"the QEMU guest agent of {name}")
        self._commands = Commands(self._connection, self._is_windows)
        self._measuring = Measuring()
        self._placing = DeferredLock()
        self._system: tuple[int, str | None] | None = None  # and of which conversation
        self._thawing: set[Deferred[None]] = set()

    # IGuestAccess

    async def answers(self, within: float) -> None:
        await self._connection.reach(within)

    async def run(
        self, command: Sequence[str], seconds: int, limit: float, max_output: int, stdin: bytes = b""
    ) -> vmserver.ExecSyncResponse:
        try:
            ended = await within(
                self._reactor, seconds or limit, self._commands.run(command, max_output, stdin), ""
            )
        except DeadlineExceeded:
            raise DeadlineExceeded(
                f"the command was killed: it did not end within {seconds or limit:g} s"
            ) from None
        return vmserver.ExecSyncResponse(
            stdout=ended.stdout, stderr=_stderr(ended, max_output), exit_code=ended.exit_code
        )

    def session(self) -> SessionCall:
        return LocalCall(self._reactor, self._serve)

    async def _serve(self, served: Served) -> int:
        if served.start.tty:
            raise NotOffered(
                "QEMU's guest agent has no terminals. kubectl attach -it is the VM's serial console; with an "
                "SSH server in the guest exec has terminals too; without -t a command runs"
            )
        stdin = b""
        if served.start.stdin:
            stdin = await self._connection.while_open(start(_input(served)))
        command = list(served.start.command) or ["/bin/sh", "-l"]
        ended = await self._commands.run(command, AGENTS_OUTPUT, stdin)
        await served.write("stdout", ended.stdout)
        await served.write("stderr", _stderr(ended, AGENTS_OUTPUT))
        return ended.exit_code

    async def put_files(self, directory: str, files: Mapping[str, GuestFile]) -> None:
        command = placing.command(directory)
        size = sum(len(file.content) for file in files.values())
        if size > MAX_STDIN:
            raise ResourceExhausted(
                f"the files for {directory} have {size} bytes, and QEMU's guest agent is sent {MAX_STDIN} at "
                "most: use SSH"
            )
        now = self._reactor.seconds()
        if len(files) > MANY_FILES:
            archive = await run_in_thread(self._reactor, placing.archive, dict(files), now)
        else:
            archive = placing.archive(files, now)
        if await self._is_windows():
            raise NotOffered(
                f"QEMU's guest agent can't bring files to {directory} of this guest, which is Windows: use a "
                "disk"
            )
        async with self._placing:
            result = await self.run(command, 0, FILES_SECONDS, 4096, archive)
        placing.check(result, directory)

    async def usage(self) -> vmserver.StatsResponse:
        result = await self.run(measuring.COMMAND, 0, USAGE_SECONDS, measuring.MAX_OUTPUT)
        stats = self._measuring.response(result.stdout, nanoseconds(self._reactor))
        if stats is None:
            raise NotOffered(_UNMEASURED)
        return stats

    async def close(self) -> None:
        self._connection.close()
        self._commands.close()
        for thawing in list(self._thawing):
            thawing.cancel()

    # What else the agent does

    async def commands(self) -> frozenset[str]:
        """Ask which of its commands the agent may execute, such as guest-exec.

        :raise Unavailable: no answer."""
        return await self._connection.ask(Request("guest-info"), answers.commands)

    async def system(self) -> str | None:
        """Ask what the guest is: debian, mswindows, …; None: it can't tell. :raise Unavailable: no answer."""
        system = self._system
        if system is None or system[0] != self._connection.conversations:
            name = await self._connection.ask(Request("guest-get-osinfo"), answers.system)
            system = self._system = self._connection.conversations, name
        return system[1]

    async def _is_windows(self) -> bool:
        return await self.system() == answers.WINDOWS

    async def power_off(self) -> None:
        """See `IPowersOff`."""
        request = Request("guest-shutdown", {"mode": "powerdown"}, silence=POWER_SECONDS, total=POWER_SECONDS)
        try:
            await self._ask(request)
        except Unanswered:
            return  # as it is documented: nothing is answered to what ends the guest

    async def add_ssh_key(self, user: str, key: str) -> None:
        """Let the holder of a key in as a user of the guest. Idempotent.

        :param key: a line of authorized_keys(5). :raise InvalidArgument: it is none, or `user` is no name.
        :raise FailedPrecondition: there is no such user."""
        if not _USER.fullmatch(user):
            raise InvalidArgument(f"{user[:80]!r} is no name of a user")
        if not _KEY.fullmatch(key):
            raise InvalidArgument("the SSH key is no line of printable ASCII")
        await self._ask(Request("guest-ssh-add-authorized-keys", {"username": user, "keys": [key]}))

    async def set_time(self, nanos: int) -> None:
        """Set the guest's clock. :param nanos: the time, since 1970 UTC."""
        begun = self._reactor.seconds()
        answer = await self._connection.ask(Request("guest-set-time", {"time": nanos}), _as_it_is)
        if answer.refusal is None:
            return
        # It also refuses after it has set the clock, in a guest that has no hwclock.
        refusal = answers.refused(answer.refusal, "guest-set-time")
        now = await self._connection.ask(Request("guest-get-time"), _time)
        passed = int((self._reactor.seconds() - begun) * 1e9)
        if now is None or abs(now - nanos - passed) > CLOCK_NANOS:
            raise refusal

    async def cards(self) -> list[GuestCard]:
        """List the guest's network cards with their addresses, as the guest says."""
        return await self._connection.ask(Request("guest-network-get-interfaces"), answers.cards)

    async def freeze(self) -> int:
        """Write what is pending and stop all writing, for a snapshot; return how many file systems stand.

        Unanswered or cancelled it thaws. Who was answered has to, also after a daemon that was killed.

        :raise NotOffered, FailedPrecondition: the guest can't."""
        request = Request("guest-fsfreeze-freeze", silence=FREEZE_SECONDS, total=FREEZE_SECONDS)
        try:
            return await self._connection.ask(request, _frozen)
        except (Unanswered, CancelledError):
            self._thaw_later()
            raise

    async def thaw(self) -> None:
        """Let file systems be written to again. Idempotent."""
        await self._ask(Request("guest-fsfreeze-thaw", silence=FREEZE_SECONDS, total=FREEZE_SECONDS))

    def _thaw_later(self) -> None:
        thawing = start(within(self._reactor, 2 * FREEZE_SECONDS, self._thaw_until_done(), "thawing"))
        self._thawing.add(thawing)
        thawing.addErrback(lambda failure: None)
        thawing.addBoth(lambda _: self._thawing.discard(thawing))

    async def _thaw_until_done(self) -> None:
        await self._connection.reach(FREEZE_SECONDS)
        await self.thaw()

    async def _ask(self, request: Request) -> None:
        await self._connection.ask(request, lambda answer: answers.checked(answer, request.command))


_UNMEASURED = "QEMU's guest agent can't measure this guest, which is no Linux with grep; its hypervisor can"


async def _input(served: Served) -> bytes:
    """Return all that the client sends, before the command begins."""
    pieces, size = [], 0
    while (read := await served.read()) is not None:
        pieces.append(read.stdin)
        size += len(read.stdin)
        if size > MAX_STDIN:
            raise ResourceExhausted(
                f"QEMU's guest agent is sent {MAX_STDIN >> 20} MiB of input at most, before the command "
                "begins: use SSH"
            )
    return b"".join(pieces)


def _stderr(ended: Ended, most: int) -> bytes:
    """Return a command's stderr, which says that output is missing."""
    if not ended.truncated:
        return ended.stderr
    note = b"infranetes: QEMU's guest agent keeps 16 MiB of each output; the rest is missing\n"
    return (ended.stderr[: max(most - len(note), 0)] + note)[:most]


def _as_it_is(answer: Answer) -> Answer:
    return answer


def _time(answer: Answer) -> int | None:
    return answers.whole(answer.value) if answer.refusal is None else None


def _frozen(answer: Answer) -> int:
    return answers.whole(answers.checked(answer, "guest-fsfreeze-freeze").value)
