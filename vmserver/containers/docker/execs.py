# SPDX-License-Identifier: Apache-2.0
"""Commands in a container that run to their end with their output captured.

Docker can't end an exec. One that runs out of time is killed as a process of this VM: Docker starts each exec
as the leader of a session of its own, so its descendants can be found.
"""

from __future__ import annotations

from collections.abc import Sequence

from twisted.internet.defer import CancelledError, TimeoutError
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from infranetes_common.concurrency import sleep, start
from infranetes_common.errors import DeadlineExceeded, InfranetesError
from infranetes_common.processes import kill_family
from vmserver.containers.docker.bodies import ByteStream
from vmserver.containers.docker.engine import Engine, EngineError
from vmserver.containers.docker.hijack import Demultiplexer
from vmserver.containers.interface import ExecResult

_KILL_TRIES = 20
_KILL_PAUSE = 0.1

_log = Logger()


class CapturedOutput:
    """Keeps the first `limit` bytes of stdout and of stderr, and drops the rest."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._demultiplexer = Demultiplexer()
        self.stdout = bytearray()
        self.stderr = bytearray()

    def feed(self, data: bytes) -> None:
        """Add bytes of Docker's multiplexed stream, split anywhere."""
        for stream, piece in self._demultiplexer.feed(data):
            captured = self.stderr if stream == "stderr" else self.stdout
            captured += piece[: max(0, self._limit - len(captured))]


async def exec_sync(
    clock: IReactorTime, engine: Engine, container: str, command: Sequence[str], within: float, limit: int
) -> ExecResult:
    """Run a command: see `IContainerProvider.exec_sync`.

    :param container: Docker's name of it. :raise EngineError: Docker refuses.
    """
    body = {"AttachStdout": True, "AttachStderr": True, "Cmd": list(command)}
    exec_id = await engine.create_exec(container, body)
    running = start(_output(engine, exec_id, limit))
    if within:
        running.addTimeout(within, clock)
    try:
        output = await running
    except (TimeoutError, CancelledError) as error:
        engine.run_in_background(kill_exec(clock, engine, exec_id))
        if isinstance(error, CancelledError):
            raise
        raise DeadlineExceeded(f"the command was killed: it did not end within {within:g} s") from None
    state = await engine.inspect_exec(exec_id)
    return ExecResult(bytes(output.stdout), bytes(output.stderr), int(state["ExitCode"] or 0))


async def _output(engine: Engine, exec_id: str, limit: int) -> CapturedOutput:
    output = CapturedOutput(limit)
    stream: ByteStream | None = None
    try:
        stream = await engine.stream("POST", f"/exec/{exec_id}/start", body={"Detach": False, "Tty": False})
        while data := await stream.read():
            output.feed(data)
    finally:
        if stream is not None:
            stream.close()
    return output


async def kill_exec(clock: IReactorTime, engine: Engine, exec_id: str) -> None:
    """Kill an exec's processes, even if it is only being started."""
    try:
        for _ in range(_KILL_TRIES):
            state = await engine.inspect_exec(exec_id)
            if state["Pid"] and not state["Running"]:
                return
            if state["Pid"]:
                kill_family(state["Pid"])
            await sleep(clock, _KILL_PAUSE)
    except (EngineError, InfranetesError) as error:
        _log.warn("a command that exceeded its time limit may still be running: {error}", error=error)
