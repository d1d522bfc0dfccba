"""Runs a command in a container to its end and keeps what it writes.

Docker has no call that ends an exec, so one that is out of time is killed as what it is: a process
of this machine. Docker starts each as the leader of a session of its own, so its children are found.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from twisted.internet.defer import CancelledError, Deferred, TimeoutError
from twisted.internet.task import deferLater
from twisted.logger import Logger

from infranetes_common.errors import DeadlineExceeded, InfranetesError
from vmserver.containers.docker.engine import ByteStream, Engine, EngineError
from vmserver.containers.docker.hijack import Frames
from vmserver.containers.interface import ExecResult
from vmserver.processes import kill_family

_KILL_TRIES = 20
_KILL_PAUSE = 0.1

_log = Logger()


class Demultiplexer:
    """Keeps at most `limit` bytes of each stream of Docker's and drops the rest."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._frames = Frames()
        self.stdout = bytearray()
        self.stderr = bytearray()

    def feed(self, data: bytes) -> None:
        """Take bytes in, split anywhere."""
        for stream, piece in self._frames.feed(data):
            kept = self.stderr if stream == "stderr" else self.stdout
            kept += piece[: max(0, self._limit - len(kept))]


async def exec_sync(
    reactor: Any, engine: Engine, container: str, command: Sequence[str], within: float, limit: int
) -> ExecResult:
    """See `IContainerProvider.exec_sync`; `container` is Docker's name of it.

    :raise EngineError: Docker refuses.
    """
    body = {"AttachStdout": True, "AttachStderr": True, "Cmd": list(command)}
    made = await engine.call("POST", f"/containers/{container}/exec", body=body)
    exec_id = made["Id"]
    running: Deferred[Demultiplexer] = Deferred.fromCoroutine(_output(engine, exec_id, limit))
    if within:
        running.addTimeout(within, reactor)
    try:
        output = await running
    except (TimeoutError, CancelledError) as ended:
        Deferred.fromCoroutine(kill_exec(reactor, engine, exec_id))
        if isinstance(ended, CancelledError):
            raise
        raise DeadlineExceeded(f"the command was killed: it did not end within {within:g} s") from None
    state = await engine.call("GET", f"/exec/{exec_id}/json")
    return ExecResult(bytes(output.stdout), bytes(output.stderr), int(state["ExitCode"] or 0))


async def _output(engine: Engine, exec_id: str, limit: int) -> Demultiplexer:
    output = Demultiplexer(limit)
    stream: ByteStream | None = None
    try:
        stream = await engine.stream("POST", f"/exec/{exec_id}/start", body={"Detach": False, "Tty": False})
        while data := await stream.read():
            output.feed(data)
    finally:
        if stream is not None:
            stream.close()
    return output


async def kill_exec(reactor: Any, engine: Engine, exec_id: str) -> None:
    """Kill the exec's processes, also when it is only now being started."""
    try:
        for _ in range(_KILL_TRIES):
            state = await engine.call("GET", f"/exec/{exec_id}/json")
            if state["Pid"] and not state["Running"]:
                return
            if state["Pid"]:
                kill_family(state["Pid"])
            await deferLater(reactor, _KILL_PAUSE, lambda: None)
    except (EngineError, InfranetesError) as error:
        _log.warn("a command out of time may still run: {error}", error=error)
