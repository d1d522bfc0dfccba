# SPDX-License-Identifier: Apache-2.0
"""One exec, attach or forwarded connection: a client's channels joined with a call to the agent."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping

from twisted.internet.defer import CancelledError, Deferred
from twisted.logger import Logger
from twisted.python.failure import Failure

from infranetes.machines.sessions import PortForwardCall, SessionCall
from infranetes.streaming import status
from infranetes.streaming.channels import Channel, ChannelClosed
from infranetes_common.concurrency import Coro
from infranetes_common.concurrency import start as run
from infranetes_common.errors import InfranetesError
from infranetes_common.wire import cri, vmserver
from txgrpc import GrpcError

_log = Logger()

#: The most bytes of one message to the agent.
MAX_MESSAGE = 128 * 1024


def command_start(request: cri.ExecRequest | cri.AttachRequest) -> vmserver.SessionStart:
    """Return the agent's SessionStart for a CRI request."""
    command = request.cmd if isinstance(request, cri.ExecRequest) else ()
    return vmserver.SessionStart(
        id=request.container_id,
        command=command,
        tty=request.tty,
        stdin=request.stdin,
        stdout=request.stdout,
        stderr=request.stderr and not request.tty,
    )


def channel_names(start: vmserver.SessionStart, version: int) -> list[str]:
    """Return the channels that a client opens for this session, the error channel first."""
    wanted = ["error"]
    wanted += [name for name in ("stdin", "stdout", "stderr") if getattr(start, name)]
    if start.tty and version >= 3:
        wanted.append("resize")
    return wanted


async def serve_command(
    begin: Callable[[], SessionCall],
    start: vmserver.SessionStart,
    channels: Mapping[str, Channel],
    version: int,
) -> None:
    """Run an exec or attach to its end, and say on the error channel how it ended.

    Cancelled when the client is lost, it cancels the call.

    :param begin: makes the agent's Exec or Attach. It raises NotFound if the container is unknown.
    :param channels: by name; one that the client did not request is missing.
    """
    pumps: list[Deferred[None]] = []
    call: SessionCall | None = None
    try:
        call = begin()
        await call.send(vmserver.SessionInput(start=start))
        if start.stdin and "stdin" in channels:
            pumps.append(_spawn(_pump_stdin(call, channels["stdin"])))
        elif not start.tty:
            await call.done_sending()
        if start.tty and "resize" in channels:
            pumps.append(_spawn(_pump_sizes(call, channels["resize"])))
        outcome = status.exited(await _copy_output(call, channels), version)
    except ChannelClosed:
        return
    except (GrpcError, InfranetesError) as error:
        outcome = status.failed(error.message if isinstance(error, GrpcError) else str(error), version)
    finally:
        for pump in pumps:
            pump.cancel()
        if call is not None:
            call.cancel()
    try:
        if outcome:
            await channels["error"].write(outcome)
    except ChannelClosed:
        return
    for channel in channels.values():
        channel.finish()


async def _copy_output(call: SessionCall, channels: Mapping[str, Channel]) -> int:
    """Write the session's output to its channels; return the exit code."""
    async for message in call:
        kind = message.WhichOneof("output")
        if kind == "end":
            return int(message.end.exit_code)
        if kind in channels:
            await channels[kind].write(getattr(message, kind))
    raise InfranetesError("the agent ended the session without an exit code; its log on the VM says why")


async def _pump_stdin(call: SessionCall, channel: Channel) -> None:
    while data := await channel.read():
        for at in range(0, len(data), MAX_MESSAGE):
            await call.send(vmserver.SessionInput(stdin=data[at : at + MAX_MESSAGE]))
    await call.done_sending()


async def _pump_sizes(call: SessionCall, channel: Channel) -> None:
    """Send terminal sizes on: JSON objects, one after the other with or without space between."""
    decoder = json.JSONDecoder()
    text = ""
    while data := await channel.read():
        text += data.decode("utf-8", "replace")
        while text := text.lstrip():
            try:
                size, end = decoder.raw_decode(text)
                text = text[end:]
                width, height = int(size["Width"]), int(size["Height"])
            except json.JSONDecodeError:
                break  # the rest is to come
            except (KeyError, TypeError, ValueError):
                continue
            if 0 < width < 65536 and 0 < height < 65536:
                resize = vmserver.TerminalSize(width=width, height=height)
                await call.send(vmserver.SessionInput(resize=resize))
        if len(text) > 4096:
            return


async def forward(begin: Callable[[], PortForwardCall], port: int, data: Channel, error: Channel) -> None:
    """Forward one connection to `port` of the pod; say on the error channel what went wrong.

    :param begin: makes the agent's PortForward. It raises NotFound if the sandbox is unknown.
    """
    sending: Deferred[None] | None = None
    call: PortForwardCall | None = None
    try:
        call = begin()
        await call.send(vmserver.PortForwardInput(port=port))
        sending = _spawn(_pump_connection(call, data))
        async for message in call:
            await data.write(message.data)
    except ChannelClosed:
        pass
    except (GrpcError, InfranetesError) as failure:
        reason = failure.message if isinstance(failure, GrpcError) else str(failure)
        with contextlib.suppress(ChannelClosed):
            await error.write(f"can't forward to port {port} of the pod: {reason}".encode())
    finally:
        if sending is not None:
            sending.cancel()
        if call is not None:
            call.cancel()
    for channel in (data, error):
        channel.drop()
        channel.finish()


async def _pump_connection(call: PortForwardCall, data: Channel) -> None:
    while piece := await data.read():
        for at in range(0, len(piece), MAX_MESSAGE):
            await call.send(vmserver.PortForwardInput(data=piece[at : at + MAX_MESSAGE]))
    await call.done_sending()


def _spawn(body: Coro[None]) -> Deferred[None]:
    """Run a pump beside the session. Its end needs no report: the session's output tells what ended that."""
    pump = run(body)

    def ended(failure: Failure) -> None:
        if failure.check(CancelledError, GrpcError, InfranetesError, ChannelClosed) is None:
            _log.failure("reading the input of a session failed", failure)

    pump.addErrback(ended)
    return pump
