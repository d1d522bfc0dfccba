"""Live sessions through Docker: exec with its streams, and attach."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.task import deferLater
from twisted.logger import Logger
from zope.interface import implementer

from infranetes_common.errors import FailedPrecondition, InfranetesError, Unavailable
from vmserver.containers.docker.engine import Engine, EngineError
from vmserver.containers.docker.execs import kill_exec
from vmserver.containers.docker.hijack import Frames, Hijacked, hijack
from vmserver.containers.interface import ISession, Streams

# Docker watches a terminal's input for keys that detach, ^P ^Q unless told others. None may be swallowed
# here, so it is told a sequence that nobody types.
DETACH_KEYS = ",".join(["ctrl-@", "ctrl-^", "ctrl-_", "ctrl-]"] * 4)
END_OF_FILE = b"\x04"
_PAUSE = (0.02, 0.5)  # between two looks whether a process has ended
_RESIZE_TRIES = 20
_SETTLE_SECONDS = 5.0  # for the engine to notice the end of a container whose streams have ended

_log = Logger()


class _Session:
    """What exec and attach have in common."""

    def __init__(self, reactor: Any, engine: Engine, connection: Hijacked) -> None:
        self._reactor = reactor
        self._engine = engine
        self._connection = connection
        self._stdin_closed = False
        self.output = connection.output

    def _write(self, data: bytes) -> Deferred[None]:
        return Deferred.fromCoroutine(self._connection.write(data))

    def _resize(self, path: str, width: int, height: int) -> Deferred[None]:
        return Deferred.fromCoroutine(self._try_resize(path, width, height))

    async def _try_resize(self, path: str, width: int, height: int) -> None:
        """Docker refuses it until the process runs, and once it has ended."""
        for _ in range(_RESIZE_TRIES):
            with contextlib.suppress(EngineError):
                await self._engine.call("POST", path + "/resize", {"h": str(height), "w": str(width)})
                return
            await deferLater(self._reactor, _PAUSE[0], lambda: None)
        _log.debug("Docker does not give {path} a size", path=path)

    async def _until_over(self, path: str, key: str, seconds: float) -> Any:
        """The inspection that says that it no longer runs, or the last one after `seconds` (0: no end)."""
        pause, longest = _PAUSE
        deadline = self._reactor.seconds() + seconds
        while True:
            try:
                found = await self._engine.call("GET", path)
            except EngineError as error:
                raise error.translated("asking how a session ended") from error
            state = found[key] if key else found
            if not state["Running"] or (seconds and self._reactor.seconds() > deadline):
                return state
            await deferLater(self._reactor, pause, lambda: None)
            pause = min(2 * pause, longest)


@implementer(ISession)
class ExecSession(_Session):
    """A command of its own in a container."""

    def __init__(
        self, reactor: Any, engine: Engine, connection: Hijacked, streams: Streams, exec_id: str
    ) -> None:
        super().__init__(reactor, engine, connection)
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
            # The connection stays: with a terminal, Docker would end the output too.
            self._write(END_OF_FILE)
        else:
            self._connection.finish()

    def resize(self, width: int, height: int) -> Deferred[None]:
        if not self._streams.tty or self._over:
            return self._write(b"")
        return self._resize(f"/exec/{self._id}", width, height)

    def ended(self) -> Deferred[int]:
        return Deferred.fromCoroutine(self._ended())

    async def _ended(self) -> int:
        state = await self._until_over(f"/exec/{self._id}/json", "", 0)
        self._over = True
        return int(state["ExitCode"] or 0)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._connection.close()
        if not self._over:
            Deferred.fromCoroutine(kill_exec(self._reactor, self._engine, self._id))


@implementer(ISession)
class AttachSession(_Session):
    """The streams of a container's first process."""

    def __init__(
        self, reactor: Any, engine: Engine, connection: Hijacked, container: str, config: Any, stdin: bool
    ) -> None:
        super().__init__(reactor, engine, connection)
        self._path = f"/containers/{container}"
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
        return self._resize(self._path, width, height) if self._tty else self._write(b"")

    def ended(self) -> Deferred[int]:
        return Deferred.fromCoroutine(self._ended())

    async def _ended(self) -> int:
        state = await self._until_over(self._path + "/json", "State", _SETTLE_SECONDS)
        if state["Running"]:
            raise Unavailable("Docker's engine ended the attached streams while the container runs on")
        return int(state["ExitCode"])

    def close(self) -> None:
        self._connection.close()


async def exec_session(
    reactor: Any, engine: Engine, socket: Path, container: str, command: Sequence[str], streams: Streams
) -> ExecSession:
    """See `IContainerProvider.exec_session`; `container` is Docker's name of it.

    :raise EngineError: Docker refuses.
    """
    body: dict[str, Any] = {
        "AttachStdin": streams.stdin,
        "AttachStdout": streams.stdout,
        "AttachStderr": streams.stderr and not streams.tty,
        "Tty": streams.tty,
        "Cmd": list(command),
        "DetachKeys": DETACH_KEYS,
    }
    if streams.tty:
        body["Env"] = ["TERM=xterm"]
    exec_id = (await engine.call("POST", f"/containers/{container}/exec", body=body))["Id"]
    start = {"Detach": False, "Tty": streams.tty}
    frames = None if streams.tty else Frames()
    try:
        connection = await hijack(reactor, socket, f"/exec/{exec_id}/start", {}, start, frames)
    except (EngineError, InfranetesError):
        raise
    except BaseException:  # cancelled: Docker may be starting it
        Deferred.fromCoroutine(kill_exec(reactor, engine, exec_id))
        raise
    return ExecSession(reactor, engine, connection, streams, exec_id)


async def attach_session(
    reactor: Any, engine: Engine, socket: Path, container: str, streams: Streams
) -> AttachSession:
    """See `IContainerProvider.attach_session`; `container` is Docker's name of it.

    :raise EngineError: Docker refuses.
    """
    found = await engine.call("GET", f"/containers/{container}/json")
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
    frames = None if config["Tty"] else Frames()
    connection = await hijack(reactor, socket, f"/containers/{container}/attach", query, None, frames)
    return AttachSession(reactor, engine, connection, container, config, stdin)
