# SPDX-License-Identifier: Apache-2.0
"""The screen of a VM that boots an image: as a picture, and as a connection by the RFB protocol.

No VM listens for the latter: QEMU is handed one end of each connection by its monitor.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Awaitable, Callable

from twisted.internet.interfaces import IAddress, IProtocol, IProtocolFactory, IStreamClientEndpoint
from twisted.internet.protocol import Factory
from zope.interface import implementer

from infranetes.providers.qemu.vm.connections import VmConnections
from infranetes_common.concurrency import deferred, run_in_thread
from infranetes_common.errors import InfranetesError, Unavailable
from infranetes_common.reactors import IReactor

MOST_BYTES = 64 << 20  # of a picture
_SECONDS = 20.0
_PNG = b"\x89PNG\r\n\x1a\n"

Monitor = Callable[[], Awaitable[VmConnections]]
"""Returns a connection to QEMU's monitor, or fails with an InfranetesError."""


async def screenshot(reactor: IReactor, monitor: Monitor) -> bytes:
    """Return the screen as PNG. :raise Unavailable: QEMU does not show it."""
    # What is written to it counts for QEMU. It has to be something that QEMU can truncate, so no pipe.
    memory = os.memfd_create("screenshot", os.MFD_CLOEXEC)
    try:
        # QEMU opens what it is passed in the same mode alone.
        writable = os.open(f"/proc/self/fd/{memory}", os.O_WRONLY | os.O_CLOEXEC)
        try:
            await _dump(await monitor(), writable)
        finally:
            os.close(writable)
        return await run_in_thread(reactor, _thd_picture, memory)
    except InfranetesError as error:
        raise Unavailable(f"the VM's screen can't be seen: {error}") from error
    finally:
        os.close(memory)


async def _dump(monitor: VmConnections, file: int) -> None:
    await monitor.qmp.execute(
        "query-status"
    )  # the connection has to have answered before it is passed a file
    number = await monitor.qmp.add_file("screenshot", file)
    try:
        await monitor.qmp.execute(
            "screendump", _SECONDS, filename=f"/dev/fdset/{number}", format="png", device="screen"
        )
    finally:
        await monitor.qmp.execute("remove-fd", fdset_id=number)


def _thd_picture(file: int) -> bytes:
    """Return the PNG at the beginning of a file. What QEMU writes is not trusted."""
    offset = len(_PNG)
    if os.pread(file, offset, 0) != _PNG:
        raise Unavailable("QEMU has written no PNG")
    while True:
        head = os.pread(file, 8, offset)
        length, kind = int.from_bytes(head[:4], "big"), head[4:]
        end = offset + 12 + length
        if not kind.isalpha() or end > MOST_BYTES:
            raise Unavailable("QEMU has written a PNG that is not whole")
        if kind == b"IEND":
            return os.pread(file, end, 0)
        offset = end


@implementer(IStreamClientEndpoint)
class ScreenEndpoint:
    """Where a VM's screen and keyboard are. See `IHypervisor.screen`."""

    def __init__(self, reactor: IReactor, monitor: Monitor) -> None:
        self._reactor = reactor
        self._monitor = monitor

    @deferred
    async def connect(self, protocolFactory: IProtocolFactory) -> IProtocol:
        """Connect. Fails with Unavailable if QEMU does not take the connection."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with ours:
            with theirs:
                name = f"screen-{secrets.token_hex(4)}"
                monitor = await self._monitor()
                await monitor.qmp.execute("query-status")
                await monitor.qmp.pass_file(name, theirs.fileno())
                await monitor.qmp.execute("add_client", protocol="vnc", fdname=name, skipauth=True)
            remembered = _Remembered(protocolFactory)
            self._reactor.adoptStreamConnection(
                ours.fileno(),
                socket.AF_UNIX,
                remembered,  # type: ignore[arg-type]  # any factory will do
            )
        if remembered.made is None:
            raise Unavailable("the connection to the VM's screen was refused")
        return remembered.made


class _Remembered(Factory):
    """Builds what another factory builds. :ivar made: what it has built."""

    noisy = False

    def __init__(self, factory: IProtocolFactory) -> None:
        self._factory = factory
        self.made: IProtocol | None = None

    def doStart(self) -> None:
        self._factory.doStart()

    def doStop(self) -> None:
        self._factory.doStop()

    def buildProtocol(  # type: ignore[override]  # it may be any protocol
        self, addr: IAddress | None
    ) -> IProtocol | None:
        assert addr is not None
        self.made = self._factory.buildProtocol(addr)
        return self.made
