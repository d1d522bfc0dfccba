"""Instances of a simulated cloud that are whole machines: each is the one container of its pod.

They have the journal of a real systemd, all the same one, and an instance that switches itself off does so as
the cloud has it.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.threads import deferToThread
from twisted.web.resource import Resource

from tests.support import systemd
from tests.support.clouds.sites import CutSite

OFF_SECONDS = 0.3


@attrs.frozen
class Seen:
    """A VM that has not ended, as the cloud itself tells of it."""

    id: str
    image: str
    size: str
    sandbox: str  # by its tags
    address: str


class Whole:
    """Those of one test's cloud.

    :param off: an instance has switched itself off. :ivar images: the images that such instances are made of.
    """

    def __init__(self, reactor: Any, off: Callable[[str], None]) -> None:
        self._reactor = reactor
        self._off = off
        self._site = CutSite(_Switch(self._switched_off))
        self._timers: list[Any] = []
        self._journal: systemd.Systemd | None = None
        self.images: list[str] = []

    def start(self) -> None:
        """Have what machines switch themselves off with."""
        self._port = self._reactor.listenTCP(0, self._site, interface="127.0.0.1")

    async def stop(self) -> None:
        """Take it away."""
        for timer in self._timers:
            if timer.active():
                timer.cancel()
        await self._port.stopListening()
        await self._site.cut()

    async def add(self, image: str) -> str:
        """Instances of `image` are whole machines."""
        if self._journal is None:
            self._journal = await deferToThread(systemd.shared)
        self.images.append(image)
        return image

    def containers(self, image: str, id: str, directory: Path) -> dict[str, Any]:
        """What the configuration of an instance's agent says of containers."""
        if image not in self.images:
            return {"provider": "fake"}
        assert self._journal is not None
        off = f"POST /{id} HTTP/1.0\\r\\n\\r\\n"
        command = f"exec 3<>/dev/tcp/127.0.0.1/{self._port.getHost().port}; printf '{off}' >&3; cat <&3"
        machine = {
            "state_dir": str(directory / "machine"),
            "journal_dir": str(self._journal.run / "log/journal"),
            "stop_command": ["bash", "-c", command],
            "kill_command": ["bash", "-c", command],
        }
        return {"provider": "machine", "providers": {"machine": machine}}

    def write(self, words: str) -> None:
        """A program of the machines writes into their journal."""
        assert self._journal is not None
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sending:
            entry = f"SYSLOG_IDENTIFIER=program\nPRIORITY=6\nMESSAGE={words}\n".encode()
            sending.sendto(entry, str(self._journal.run / "systemd/journal/socket"))

    def _switched_off(self, id: str) -> None:
        """An instance switches itself off: it is off a moment later."""
        self._timers.append(self._reactor.callLater(OFF_SECONDS, self._off, id))


class _Switch(Resource):
    """Where a machine says that it switches itself off."""

    isLeaf = True

    def __init__(self, off: Callable[[str], None]) -> None:
        super().__init__()
        self._off = off

    def render(self, request: Any) -> bytes:
        self._off(request.path.decode().strip("/"))
        return b""
