# SPDX-License-Identifier: Apache-2.0
"""Connect to a VM's unix sockets: QEMU's monitor and the agent's identity port. See also `agent_port`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from twisted.internet.defer import CancelledError
from twisted.internet.endpoints import UNIXClientEndpoint
from twisted.internet.interfaces import IAddress, ITransport
from twisted.internet.protocol import Factory, Protocol

from infranetes.providers.qemu.program.identity_port import IdentityPort
from infranetes.providers.qemu.program.qmp import QmpConnection, QmpEvent
from infranetes_common.concurrency import cancellable
from infranetes_common.errors import Unavailable
from infranetes_common.reactors import IReactor

QMP, IDENTITY, AGENT = "qmp", "identity", "agent-port"
CONSOLE, GUEST_AGENT = "console", "agent"  # of VMs that boot images


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
    qmp = await connect_monitor(reactor, directory, on_event, on_lost)
    port = IdentityPort()
    try:
        await _connect(reactor, directory / IDENTITY, port)
    except Unavailable:
        qmp.close()
        raise
    return qmp, port


async def connect_monitor(
    reactor: IReactor,
    directory: Path,
    on_event: Callable[[QmpEvent], None] = lambda event: None,
    on_lost: Callable[[], None] = lambda: None,
) -> QmpConnection:
    """Connect to QEMU's monitor alone, like `connect`. QEMU serves one connection at a time."""
    qmp = QmpConnection(reactor, on_event, on_lost)
    await _connect(reactor, directory / QMP, qmp)
    return qmp


async def connect_silently(reactor: IReactor, path: Path) -> ITransport:
    """Connect to a socket where nothing is said. :raise Unavailable: nobody listens there."""
    protocol = Protocol()
    await _connect(reactor, path, protocol)
    assert protocol.transport is not None
    return protocol.transport


async def _connect(reactor: IReactor, path: Path, protocol: Protocol) -> None:
    try:
        await cancellable(UNIXClientEndpoint(reactor, str(path)).connect(_OneConnection(protocol)))
    except CancelledError:
        raise
    except Exception as error:
        raise Unavailable(f"QEMU's socket {path} can't be reached: {error}") from error
