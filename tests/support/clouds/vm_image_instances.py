# SPDX-License-Identifier: Apache-2.0
"""Instances of VM-image pods in a simulated cloud: each is the one container of its pod.

They share the journal of one real systemd. An instance that powers itself off ends as the cloud has it.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.interfaces import IDelayedCall
from twisted.internet.threads import deferToThread
from twisted.web.resource import Resource

from tests.support import systemd
from tests.support.clouds.http_sites import ClosableSite

OFF_SECONDS = 0.3


@attrs.frozen
class RunningVM:
    """A VM that has not ended, as the cloud itself describes it."""

    id: str
    image: str
    size: str
    sandbox: str  # by its tags
    address: str


class VMImageInstances:
    """The VM-image instances of one test's cloud.

    :param off: called with each instance that powered itself off.
    :ivar images: the images of VM-image instances.
    """

    def __init__(self, reactor: Any, off: Callable[[str], None]) -> None:
        self._reactor = reactor
        self._off = off
        self._site = ClosableSite(_Switch(self._switched_off))
        self._timers: list[IDelayedCall] = []
        self._journal: systemd.Systemd | None = None
        self.images: list[str] = []

    def start(self) -> None:
        """Start the server that VMs power themselves off with."""
        self._port = self._reactor.listenTCP(0, self._site, interface="127.0.0.1")

    async def stop(self) -> None:
        """Stop the server."""
        for timer in self._timers:
            if timer.active():
                timer.cancel()
        await self._port.stopListening()
        await self._site.close_connections()

    async def add(self, image: str) -> str:
        """Make instances of `image` VM-image pods. Returns the image."""
        if self._journal is None:
            self._journal = await deferToThread(systemd.shared)
        self.images.append(image)
        return image

    def containers(self, image: str, id: str, directory: Path) -> dict[str, Any]:
        """Return the configuration of containers for an instance's agent."""
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
        """Write into the VMs' journal."""
        assert self._journal is not None
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sending:
            entry = f"SYSLOG_IDENTIFIER=program\nPRIORITY=6\nMESSAGE={words}\n".encode()
            sending.sendto(entry, str(self._journal.run / "systemd/journal/socket"))

    def _switched_off(self, id: str) -> None:
        """Power an instance off a moment later."""
        self._timers.append(self._reactor.callLater(OFF_SECONDS, self._off, id))


class _Switch(Resource):
    """The resource that a VM requests to power itself off."""

    isLeaf = True

    def __init__(self, off: Callable[[str], None]) -> None:
        super().__init__()
        self._off = off

    def render(self, request: Any) -> bytes:
        self._off(request.path.decode().strip("/"))
        return b""
