# SPDX-License-Identifier: Apache-2.0
"""Connect to a VM's two unix sockets: QEMU's monitor and the agent's identity port."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from twisted.internet.endpoints import UNIXClientEndpoint
from twisted.internet.interfaces import IAddress
from twisted.internet.protocol import Factory, Protocol

from infranetes.providers.qemu.identity_port import IdentityPort
from infranetes.providers.qemu.qmp import QmpConnection, QmpEvent
from infranetes_common.errors import Unavailable
from infranetes_common.reactors import IReactor

QMP, IDENTITY = "qmp", "identity"


class _OneConnection(Factory):
    """Builds a protocol that was made beforehand."""

    noisy = False

    def __init__(self, protocol: Protocol) -> None:
        self._protocol = protocol

    def buildProtocol(self, addr: IAddress | None) -> Protocol:
        return self._protocol


async def connect(
    reactor: IReactor,
    directory: Path,
    on_event: Callable[[QmpEvent], None] = lambda event: None,
    on_lost: Callable[[], None] = lambda: None,
) -> tuple[QmpConnection, IdentityPort]:
    """Connect to the sockets in `directory`.

    :param on_event: called with each of QEMU's events.
    :param on_lost: called when the monitor's connection is lost.
    :raise Unavailable: nobody listens there.
    """
    qmp = QmpConnection(reactor, on_event, on_lost)
    port = IdentityPort()
    try:
        await UNIXClientEndpoint(reactor, str(directory / QMP)).connect(_OneConnection(qmp))
        await UNIXClientEndpoint(reactor, str(directory / IDENTITY)).connect(_OneConnection(port))
    except Exception as error:
        qmp.close()
        raise Unavailable(f"QEMU's socket in {directory} can't be reached: {error}") from error
    return qmp, port
