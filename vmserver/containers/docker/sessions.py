# SPDX-License-Identifier: Apache-2.0
"""Docker's live sessions: exec and attach."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from twisted.internet.defer import Deferred, succeed
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from zope.interface import implementer

from infranetes_common.concurrency import backoff, deferred, sleep
from infranetes_common.errors import FailedPrecondition, InfranetesError, Unavailable
from infranetes_common.reactors import IReactor
from vmserver.containers.docker.api import ContainerConfig, Request
from vmserver.containers.docker.engine import Engine, EngineError
from vmserver.containers.docker.execs import kill_exec
from vmserver.containers.docker.hijack import Demultiplexer, HijackedConnection, hijack
from vmserver.containers.interface import ISession, Streams

# Docker detaches a terminal on a sequence of keys, by default ^P ^Q, and swallows them. So that no input is
# lost, set a sequence that no user types.
DETACH_KEYS = ",".join(["ctrl-@", "ctrl-^", "ctrl-_", "ctrl-]"] * 4)
END_OF_FILE = b"\x04"
_POLL_SECONDS = (0.02, 0.5)  # the first pause between two inspections, and the longest
_RESIZE_TRIES = 20
_SETTLE_SECONDS = 5.0  # for the engine to notice the end of a container whose streams have ended

_log = Logger()


class _Session:
    """The part that exec and attach sessions have in common."""

    def __init__(self, clock: IReactorTime, engine: Engine, connection: HijackedConnection) -> None:
        self._clock = clock
        self._engine = engine
        self._connection = connection
        self._stdin_closed = False
        self.output = connection.output

    @deferred
    async def _write(self, data: bytes) -> None:
        await self._connection.write(data)

    @deferred
    async def _resize(self, path: str, width: int, height: int) -> None:
        """Resize the terminal, trying again while Docker refuses because the process is not running yet."""
        for _ in range(_RESIZE_TRIES):
            with contextlib.suppress(EngineError):
                await self._engine.call("POST", path + "/resize", {"h": str(height), "w": str(width)})
                return
            await sleep(self._clock, _POLL_SECONDS[0])
        _log.debug("Docker refused to resize the terminal of {path}", path=path)


@implementer(ISession)
class ExecSession(_Session):
    """A command in a container."""

    def __init__(
        self,
        clock: IReactorTime,
        engine: Engine,
        connection: HijackedConnection,
        streams: Streams,
        exec_id: str,
    ) -> None:
        super().__init__(clock, engine, connection)
        self._streams = streams
        self._id = exec_id
        self._closed = False
        self._over = False

    def write(self, data: bytes) -> Deferred[None]:
        return self._write(data if self._streams.stdin and not self._stdin_closed else b"")

    def close_stdin(self) -> None:
        if self._stdin_closed or not self._streams.stdin:
            return
        self._stdin_closed = True
        if self._streams.tty:
            # With a terminal, closing the connection would end Docker's output too.
            self._write(END_OF_FILE)
        else:
            self._connection.finish()

    def resize(self, width: int, height: int) -> Deferred[None]:
        if not self._streams.tty or self._over:
            return succeed(None)
        return self._resize(f"/exec/{self._id}", width, height)

    @deferred
    async def ended(self) -> int:
        for pause in backoff(*_POLL_SECONDS):
            with _translated():
                state = await self._engine.inspect_exec(self._id)
            if not state["Running"]:
                break
            await sleep(self._clock, pause)
        self._over = True
        return int(state["ExitCode"] or 0)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._connection.close()
        if not self._over:
            self._engine.run_in_background(kill_exec(self._clock, self._engine, self._id))


@implementer(ISession)
class AttachSession(_Session):
    """The streams of a container's first process."""

    def __init__(
        self,
        clock: IReactorTime,
        engine: Engine,
        connection: HijackedConnection,
        container: str,
        config: ContainerConfig,
        stdin: bool,
    ) -> None:
        super().__init__(clock, engine, connection)
        self._container = container
        self._tty = bool(config["Tty"])
        self._once = bool(config["StdinOnce"])
        self._stdin = stdin

    def write(self, data: bytes) -> Deferred[None]:
        return self._write(data if self._stdin and not self._stdin_closed else b"")

    def close_stdin(self) -> None:
        if self._stdin_closed:
            return
        self._stdin_closed = True
        if self._stdin and self._once and not self._tty:
            self._connection.finish()

    def resize(self, width: int, height: int) -> Deferred[None]:
        path = f"/containers/{self._container}"
        return self._resize(path, width, height) if self._tty else succeed(None)

    @deferred
    async def ended(self) -> int:
        deadline = self._clock.seconds() + _SETTLE_SECONDS
        for pause in backoff(*_POLL_SECONDS):
            with _translated():
                state = (await self._engine.inspect_container(self._container))["State"]
            if not state["Running"]:
                break
            if self._clock.seconds() > deadline:
                raise Unavailable("Docker's engine ended the attached streams while the container runs on")
            await sleep(self._clock, pause)
        return int(state["ExitCode"])

    def close(self) -> None:
        self._connection.close()


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except EngineError as error:
        raise error.translated("asking for the exit code of a session") from error


async def exec_session(
    reactor: IReactor, engine: Engine, socket: Path, container: str, command: Sequence[str], streams: Streams
) -> ExecSession:
    """Run a command: see `IContainerProvider.exec_session`.

    :param container: Docker's name of it. :raise EngineError: Docker refuses.
    """
    body: Request = {
        "AttachStdin": streams.stdin,
        "AttachStdout": streams.stdout,
        "AttachStderr": streams.stderr and not streams.tty,
        "Tty": streams.tty,
        "Cmd": list(command),
        "DetachKeys": DETACH_KEYS,
    }
    if streams.tty:
        body["Env"] = ["TERM=xterm"]
    exec_id = await engine.create_exec(container, body)
    options: Request = {"Detach": False, "Tty": streams.tty}
    demultiplexer = None if streams.tty else Demultiplexer()
    try:
        connection = await hijack(reactor, socket, f"/exec/{exec_id}/start", {}, options, demultiplexer)
    except (EngineError, InfranetesError):
        raise
    except BaseException:  # cancelled: Docker may be starting the command
        engine.run_in_background(kill_exec(reactor, engine, exec_id))
        raise
    return ExecSession(reactor, engine, connection, streams, exec_id)


async def attach_session(
    reactor: IReactor, engine: Engine, socket: Path, container: str, streams: Streams
) -> AttachSession:
    """Attach to a container: see `IContainerProvider.attach_session`.

    :param container: Docker's name of it. :raise EngineError: Docker refuses.
    """
    found = await engine.inspect_container(container)
    config = found["Config"]
    if not found["State"]["Running"]:
        raise FailedPrecondition("the container is not running")
    stdin = bool(streams.stdin and config["OpenStdin"])
    wanted = {
        "stream": True,
        "stdin": stdin,
        "stdout": streams.stdout,
        "stderr": streams.stderr and not config["Tty"],
    }
    query = {name: "1" if value else "0" for name, value in wanted.items()} | {"detachKeys": DETACH_KEYS}
    demultiplexer = None if config["Tty"] else Demultiplexer()
    connection = await hijack(reactor, socket, f"/containers/{container}/attach", query, None, demultiplexer)
    return AttachSession(reactor, engine, connection, container, config, stdin)
