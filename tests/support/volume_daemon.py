# SPDX-License-Identifier: Apache-2.0
"""A daemon's volumes alone, in processes that can be killed.

`python volume_daemon.py PROVIDER SOCKET` has a process for each connection to the socket, forked from itself
once everything is imported: that takes longer than most of them live. Each reads JSON, a line each: first
`{"number", "provider", "table", "cluster", "node", "root"}`, then calls of `IVolumes`, `{"number", "call",
"arguments"}`. Each is answered by a line with its number and `result`, or `error`, the name of the error's
class, and `words`; the first one's result is the process's id. A process ends with its connection.

This is no module of `tests`, whose guards would be imported too.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.protocol import Factory
from twisted.internet.task import react
from twisted.protocols.basic import LineOnlyReceiver

from infranetes.providers import registry
from infranetes.providers.interface import IPodProvider, ProviderContext
from infranetes.providers.volumes import IHasVolumes, VolumeDisk
from infranetes_common.concurrency import start
from infranetes_common.reactors import IReactor

_BACKLOG = 8


class VolumeCalls(LineOnlyReceiver):
    """A connection."""

    delimiter = b"\n"
    MAX_LENGTH = 1 << 20

    def __init__(self, reactor: IReactor, over: Any) -> None:
        self._reactor = reactor
        self._over = over
        self._provider: IPodProvider | None = None

    def lineReceived(self, line: bytes) -> None:
        asked = json.loads(line)
        work = self._begin(asked) if self._provider is None else self._call(asked)
        start(work).addErrback(lambda failure: self._tell(asked.get("number", 0), error=failure.value))

    def connectionLost(self, reason: object = None) -> None:
        self._over.callback(None)

    async def _begin(self, asked: Any) -> None:
        root = Path(asked["root"])
        context = ProviderContext(root, root, asked["cluster"], asked["node"])
        self._provider = registry.create(self._reactor, asked["provider"], asked["table"], context)
        await self._provider.start(lambda words: None)
        self._tell(0, result=os.getpid())

    async def _call(self, asked: Any) -> None:
        call = getattr(IHasVolumes(self._provider).volumes, asked["call"])
        self._tell(asked["number"], result=_plain(await call(*asked["arguments"])))

    def _tell(self, number: int, result: object = None, error: BaseException | None = None) -> None:
        answer: dict[str, object] = {"number": number, "result": result}
        if error is not None:
            answer |= {"error": type(error).__name__, "words": str(error)}
        self.sendLine(json.dumps(answer).encode())


def _plain(result: object) -> object:
    """What JSON has for a result: a volume's id."""
    return result.id if isinstance(result, VolumeDisk) else result


def serve(reactor: Any, connection: socket.socket) -> Any:
    """The whole of one process."""
    over: Deferred[None] = Deferred()
    factory = Factory.forProtocol(lambda: VolumeCalls(reactor, over))
    reactor.adoptStreamConnection(connection.fileno(), connection.family, factory)
    connection.close()
    return over


def main(provider: str, path: str) -> None:
    """Fork a process for each connection, until the standard input ends with whoever began this."""
    import_module(f"infranetes.providers.cloud.{provider}")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody has to wait for them
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen(_BACKLOG)
        print("listening", flush=True)
        while sys.stdin not in select.select([listening, sys.stdin], [], [])[0]:
            connection, _ = listening.accept()
            if not os.fork():
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                listening.close()
                react(serve, (connection,))
            connection.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
