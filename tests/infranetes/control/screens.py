# SPDX-License-Identifier: Apache-2.0
"""A pod whose image is a VM, with a screen on a real unix socket, and a client of the control socket."""

from __future__ import annotations

import struct
import zlib

from twisted.internet.protocol import Factory

from infranetes.control.screens import ScreenCalls
from infranetes_common.byte_connection import ByteConnection
from infranetes_common.concurrency import start
from tests.infranetes.control.visit_case import VisitCase, reactor
from tests.infranetes.machines.agentless.fakes import FakeHypervisor
from tests.infranetes.pods.fakes import FakeNode, box
from tests.infranetes.pods.features.test_guests import GuestNode

GREETING = b"RFB 003.008\n"


def png(width: int = 2, height: int = 1, filler: int = 0) -> bytes:
    """Return a picture. :param filler: bytes that are added to it."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        )

    rows = zlib.compress((b"\0" + b"\xff\0\0" * width) * height)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", header), chunk(b"IDAT", rows), chunk(b"tEXt", bytes(filler)), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


class Screen(Factory):
    """A screen that greets as RFB servers do, and shows what is typed.

    :ivar connected: its connections, the first one first. :ivar reading: whether it takes what is typed.
    :ivar gone: how many were closed."""

    noisy = False

    def __init__(self) -> None:
        self.connected: list[ByteConnection] = []
        self.reading = True
        self.gone = 0

    def buildProtocol(self, addr: object) -> ByteConnection:
        connection = ByteConnection("the viewer")
        self.connected.append(connection)
        reactor.callLater(0, self._begin, connection)
        return connection

    def _begin(self, connection: ByteConnection) -> None:
        start(self._serve(connection)).addErrback(lambda _: None).addBoth(self._ended)

    async def _serve(self, connection: ByteConnection) -> None:
        await connection.write(GREETING)
        while self.reading and (data := await connection.read()):
            await connection.write(data)

    def _ended(self, _: object) -> None:
        self.gone += 1


class ScreenCase(VisitCase):
    """The pod `web`, whose VM has a screen."""

    log = "infranetes.control.screens"
    world: GuestNode

    async def setUp(self) -> None:
        await super().setUp()
        self.container = await start(self.world.containers.create(self.sandbox, box()))
        self.hypervisor: FakeHypervisor = list(self.world.provider.hypervisors.values())[-1]
        self.hypervisor.picture = png()
        self.screen = Screen()
        await self.listen("screen", self.screen)
        self.view("screen")
        node = self.world.node
        self.calls = ScreenCalls(self.world.clock, node.inventory, node.providers, lambda: self.allowed)
        await self.serve_control(self.calls)

    def make_world(self) -> FakeNode:
        return GuestNode(self.directory / "guests")

    def view(self, name: str) -> None:
        """Have the VM's screen be what listens at a socket of this name."""
        self.hypervisor.viewed = self.socket(name)
