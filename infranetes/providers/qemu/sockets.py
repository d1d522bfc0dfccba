"""Connecting to a machine's two unix sockets: its monitor and its agent's port."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from twisted.internet.endpoints import UNIXClientEndpoint
from twisted.internet.protocol import Factory, Protocol

from infranetes.providers.qemu.identity_port import IdentityPort
from infranetes.providers.qemu.qmp import Event, Qmp
from infranetes_common.errors import Unavailable

QMP, IDENTITY = "qmp", "identity"


class _Just(Factory):
    """For one connection."""

    noisy = False

    def __init__(self, protocol: Protocol) -> None:
        self._protocol = protocol

    def buildProtocol(self, addr: Any) -> Protocol:
        return self._protocol


async def connect(
    reactor: Any,
    directory: Path,
    happened: Callable[[Event], None] = lambda event: None,
    lost: Callable[[], None] = lambda: None,
) -> tuple[Qmp, IdentityPort]:
    """Connections to the monitor and the agent's port in `directory`.

    :param happened: called with each of QEMU's events. :param lost: called when the monitor is gone.
    :raise Unavailable: nobody listens there.
    """
    qmp = Qmp(reactor, happened, lost)
    port = IdentityPort()
    try:
        await UNIXClientEndpoint(reactor, str(directory / QMP)).connect(_Just(qmp))
        await UNIXClientEndpoint(reactor, str(directory / IDENTITY)).connect(_Just(port))
    except Exception as error:
        qmp.close()
        raise Unavailable(f"QEMU's socket in {directory} can't be reached: {error}") from error
    return qmp, port
