"""Starts a container's shim."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.protocol import ProcessProtocol

from vmserver.containers.fake import shim


class Supervisor(ProcessProtocol):
    """The shim as this process's child, until it says that it is ready."""

    def __init__(self) -> None:
        self.ready: Deferred[None] = Deferred()

    @classmethod
    def spawn(cls, reactor: Any, directory: Path, id: str) -> Deferred[None]:
        """Fires once descriptor 3 is closed."""
        protocol = cls()
        arguments = [sys.executable, "-I", "-S", shim.__file__, str(directory), id]
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        try:
            reactor.spawnProcess(
                protocol,
                sys.executable,
                arguments,
                env={},
                path="/",
                childFDs={0: null, 1: null, 2: null, 3: "r"},
            )
        finally:
            os.close(null)
        return protocol.ready

    def childConnectionLost(self, childFD: int) -> None:
        self._is_ready()

    def processExited(self, reason: Any) -> None:
        self._is_ready()

    def _is_ready(self) -> None:
        if not self.ready.called:
            self.ready.callback(None)
