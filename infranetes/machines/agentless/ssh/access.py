# SPDX-License-Identifier: Apache-2.0
"""`IGuestAccess` by SSH."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import attrs
from twisted.conch.ssh.keys import BadKeyError, EncryptedKeyError, Key
from twisted.internet.defer import DeferredLock
from twisted.internet.interfaces import IStreamClientEndpoint
from zope.interface import implementer

from infranetes.machines.agent.marked import marked_endpoint
from infranetes.machines.agentless import measuring, placing
from infranetes.machines.agentless.access import SSH_PORT, GuestFile, IGuestAccess
from infranetes.machines.agentless.local_call import LocalCall, Served
from infranetes.machines.agentless.measuring import Measuring
from infranetes.machines.agentless.ssh.commands import Commands, collected, relayed
from infranetes.machines.agentless.ssh.connections import CONNECT_SECONDS, Connections
from infranetes.machines.agentless.ssh.keys import key_blob, key_line
from infranetes.machines.agentless.ssh.shells import check_posix
from infranetes.machines.agentless.ssh.transport import Identity, another_key
from infranetes.machines.sessions import SessionCall
from infranetes_common.concurrency import Coro, run_in_thread, sleep, within
from infranetes_common.endpoints import tcp_endpoint
from infranetes_common.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotOffered,
    ResourceExhausted,
    Unavailable,
)
from infranetes_common.nanoseconds import nanoseconds
from infranetes_common.reactors import IReactor
from infranetes_common.wire import vmserver

T = TypeVar("T")

FILES_SECONDS = 120.0
USAGE_SECONDS = 20.0
LARGE_OUTPUT = 1024 * 1024  # bytes
MANY_FILES = 200  # of which an archive is made in a thread
ROOT = "root"


@attrs.frozen
class Login:
    """How the node logs in to a guest.

    :ivar key: the user's private key: an Ed25519 key's PEM text, as `keys.make_key` makes it.
    :ivar host_key: the guest's, the line of its .pub file; "": it is learned by the first login.
    :ivar sudo: commands run by `sudo -n`. None: unless the user is root.
    """

    host: str
    user: str
    key: str = attrs.field(repr=False)
    host_key: str = ""
    port: int = SSH_PORT
    sudo: bool | None = None
    marked: bool = False  # its packets have the mark by which the node lets them out to the port


@implementer(IGuestAccess)
class SshAccess:
    """An `IGuestAccess` over a guest's SSH server.

    A server with another host key than the guest's is never talked to.

    :param name: of whose VM, for messages: "sandbox 1f2e".
    :param learned: called with the host key of the first login, a line, if `login` does not have it. Keep it,
        and give this only where nobody else can answer in the guest's place.
    :raise InvalidArgument: the login has no usable keys.
    """

    name = "ssh"

    def __init__(
        self, reactor: IReactor, login: Login, name: str, learned: Callable[[str], None] | None = None
    ) -> None:
        if not login.host_key and learned is None:
            raise InvalidArgument(f"the host key of {name} has to be known, or to be learned")
        self._reactor = reactor
        self._who = f"the guest of {name} at {login.host}:{login.port}"
        self._login = login
        self._key = _private_key(login.key)
        self._host_key = key_blob(login.host_key) if login.host_key else b""
        self._learned = learned
        endpoint: IStreamClientEndpoint
        if login.marked:
            endpoint = marked_endpoint(reactor, login.host, login.port, CONNECT_SECONDS)
        else:
            endpoint = tcp_endpoint(reactor, login.host, login.port, CONNECT_SECONDS)
        self._connections = Connections(reactor, endpoint, self._identity, self._proved)
        sudo = login.user != ROOT if login.sudo is None else login.sudo
        self._commands = Commands(reactor, self._connections, sudo)
        self._measuring = Measuring()
        self._placing = DeferredLock()

    def _identity(self) -> Identity:
        return Identity(self._login.user, self._key, self._host_key)

    def _proved(self, host_key: bytes) -> None:
        if not self._host_key and self._learned is not None:
            self._learned(key_line(host_key))
            self._host_key = host_key
        if host_key != self._host_key:  # it was learned while this login was under way
            raise another_key(self._host_key, host_key)

    # IGuestAccess

    async def answers(self, within: float) -> None:
        probing = self._commands.run_line(lambda shell: shell.probe)
        with self._named():
            try:
                shell, code = await self._within(within, probing, f"it did not run anything in {within:g} s")
            except DeadlineExceeded as error:
                raise Unavailable(str(error)) from None
            if code:
                raise FailedPrecondition(shell.refused)

    async def run(
        self, command: Sequence[str], seconds: int, limit: float, max_output: int, stdin: bytes = b""
    ) -> vmserver.ExecSyncResponse:
        with self._named():
            if seconds:
                return await self._run(command, seconds, max_output, stdin)
            return await self._within(limit, self._run(command, 0, max_output, stdin), _late(limit))

    async def _run(
        self, command: Sequence[str], seconds: int, max_output: int, stdin: bytes
    ) -> vmserver.ExecSyncResponse:
        async with self._commands.running(command) as channel:
            collecting = collected(channel, max_output, stdin)
            if seconds:
                stdout, stderr = await self._within(seconds, collecting, _late(seconds))
            else:
                stdout, stderr = await collecting
            code = channel.exit_code()
        if len(stdout) + len(stderr) > LARGE_OUTPUT:
            await sleep(self._reactor, 0)  # it was copied once, and is again: each takes a turn
        return vmserver.ExecSyncResponse(stdout=stdout, stderr=stderr, exit_code=code)

    def session(self) -> SessionCall:
        return LocalCall(self._reactor, self._serve)

    async def _serve(self, served: Served) -> int:
        request = served.start
        term = (request.term or "xterm") if request.tty else ""
        with self._named():
            async with self._commands.running(request.command, term) as channel:
                return await relayed(channel, served)

    async def put_files(self, directory: str, files: Mapping[str, GuestFile]) -> None:
        command, now = placing.command(directory), self._reactor.seconds()
        if len(files) > MANY_FILES:
            archive = await run_in_thread(self._reactor, placing.archive, dict(files), now)
        else:
            archive = placing.archive(files, now)
        async with self._placing:
            await self._check_posix(f"bringing files to {directory}")
            result = await self.run(command, 0, FILES_SECONDS, 4096, archive)
        placing.check(result, directory)

    async def usage(self) -> vmserver.StatsResponse:
        await self._check_posix("measuring what is used")
        result = await self.run(measuring.COMMAND, 0, USAGE_SECONDS, measuring.MAX_OUTPUT)
        stats = self._measuring.response(result.stdout, nanoseconds(self._reactor))
        if stats is None:
            raise NotOffered(f"{self._who} is no Linux with grep, so only its hypervisor can measure it")
        return stats

    async def close(self) -> None:
        self._connections.close()
        self._commands.close()

    async def _check_posix(self, what: str) -> None:
        with self._named():
            check_posix(await self._commands.shell(), what)

    async def _within(self, seconds: float, work: Coro[T], late: str) -> T:
        try:
            return await within(self._reactor, seconds, work, "")
        except DeadlineExceeded:
            raise DeadlineExceeded(late) from None

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Say in errors which guest it is."""
        try:
            yield
        except (Unavailable, FailedPrecondition, ResourceExhausted) as error:
            raise type(error)(f"{self._who}: {error}") from None


def _late(seconds: float) -> str:
    return f"the command was killed: it did not end within {seconds:g} s"


def _private_key(text: str) -> Key:
    try:
        key: Key = Key.fromString(text.encode())
    except (BadKeyError, EncryptedKeyError, ValueError, IndexError, KeyError):
        raise InvalidArgument(
            "the node's private SSH key can't be read: it is none, or has a password"
        ) from None
    if key.isPublic() or key.sshType() != b"ssh-ed25519":
        raise InvalidArgument("the node's SSH key has to be an Ed25519 key, and a private one")
    return key
