"""Joins a client's channels with a call to the agent: one exec, attach or forwarded connection each."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.logger import Logger

from infranetes.streaming import status
from infranetes.streaming.channels import Channel, ChannelClosed
from infranetes_common import vmserver
from infranetes_common.errors import InfranetesError
from txgrpc import GrpcError

_log = Logger()

#: Bytes of one message to the agent.
MAX_MESSAGE = 64 * 1024

#: Gives a call to the agent, not yet begun. It raises NotFound where the container or sandbox is unknown.
Begin = Callable[[], Any]


def command_start(request: Any, command: list[str]) -> Any:
    """The agent's SessionStart for a CRI ExecRequest or AttachRequest."""
    return vmserver.SessionStart(
        id=request.container_id,
        command=command,
        tty=request.tty,
        stdin=request.stdin,
        stdout=request.stdout,
        stderr=request.stderr and not request.tty,
    )


def channel_names(start: Any, version: int) -> list[str]:
    """The channels that a client opens for this session, the error channel first."""
    wanted = ["error"]
    wanted += [name for name in ("stdin", "stdout", "stderr") if getattr(start, name)]
    if start.tty and version >= 3:
        wanted.append("resize")
    return wanted


async def serve_command(begin: Begin, start: Any, channels: Mapping[str, Channel], version: int) -> None:
    """Run an exec or attach to its end, and say on the error channel how it ended.

    :param begin: gives the agent's Exec or Attach. :param channels: by name; one that is missing was not
        asked for. Cancelled when the client is lost, it cancels the call.
    """
    pumps: list[Deferred[None]] = []
    call: Any = None
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


async def _copy_output(call: Any, channels: Mapping[str, Channel]) -> int:
    """The session's output onto its channels; the exit code."""
    async for message in call:
        kind = message.WhichOneof("output")
        if kind == "end":
            return int(message.end.exit_code)
        if kind in channels:
            await channels[kind].write(getattr(message, kind))
    raise InfranetesError("the agent ended the session without an exit code; its log on the VM says why")


async def _pump_stdin(call: Any, channel: Channel) -> None:
    while data := await channel.read():
        for at in range(0, len(data), MAX_MESSAGE):
            await call.send(vmserver.SessionInput(stdin=data[at : at + MAX_MESSAGE]))
    await call.done_sending()


async def _pump_sizes(call: Any, channel: Channel) -> None:
    """Terminal sizes are JSON objects, one after the other with or without space between."""
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


async def forward(begin: Begin, port: int, data: Channel, error: Channel) -> None:
    """Carry one connection to `port` of the pod; what goes wrong is said on the error channel.

    :param begin: gives the agent's PortForward.
    """
    sending: Deferred[None] | None = None
    call: Any = None
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


async def _pump_connection(call: Any, data: Channel) -> None:
    while piece := await data.read():
        for at in range(0, len(piece), MAX_MESSAGE):
            await call.send(vmserver.PortForwardInput(data=piece[at : at + MAX_MESSAGE]))
    await call.done_sending()


def _spawn(body: Coroutine[Any, Any, None]) -> Deferred[None]:
    """Run beside the session; what ends the session is told by its output, so a pump's end is no news."""
    pump: Deferred[None] = Deferred.fromCoroutine(body)

    def ended(failure: Any) -> None:
        if failure.check(CancelledError, GrpcError, ChannelClosed) is None:
            _log.failure("the input of a session broke", failure)

    pump.addErrback(ended)
    return pump
