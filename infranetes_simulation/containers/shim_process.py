# SPDX-License-Identifier: Apache-2.0
"""Start a container's shim."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorProcess
from twisted.internet.protocol import ProcessProtocol
from twisted.python.failure import Failure

from infranetes_common.concurrency import Event
from infranetes_simulation.containers import shim


class _Shim(ProcessProtocol):
    """The shim as this process's child, until it is ready."""

    def __init__(self) -> None:
        self.ready: Event[None] = Event()

    def childConnectionLost(self, childFD: int) -> None:
        self.ready.succeed(None)

    def processExited(self, reason: Failure) -> None:
        self.ready.succeed(None)


def start_shim(reactor: IReactorProcess, directory: Path, id: str) -> Deferred[None]:
    """Start the shim of container `id`; fires once it is known whether the command runs."""
    protocol = _Shim()
    arguments = [sys.executable, "-I", "-S", shim.__file__, str(directory), id]
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        reactor.spawnProcess(
            protocol,
            sys.executable,
            arguments,
            env={},
            path="/",
            childFDs={0: null, 1: null, 2: null, shim.READY_FD: "r"},
        )
    finally:
        os.close(null)
    return protocol.ready.wait()
