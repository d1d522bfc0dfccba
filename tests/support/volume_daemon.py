# SPDX-License-Identifier: Apache-2.0
"""Only the volumes of a daemon, in processes that can be killed.

`python volume_daemon.py PROVIDER SOCKET` forks a process for each connection to the socket, from a process
that has imported everything, because importing takes longer than most of them live. Each process reads lines
of JSON: first `{"number", "provider", "table", "cluster", "node", "root"}`, then calls of `IVolumes`,
`{"number", "call", "arguments"}`. It answers each by a line with its number and either `result`, or `error`,
the name of the error's class, and `words`; the first result is the process's id. A process ends with its
connection.

It is run as a file and not as a module of `tests`, which would import the tests' guards too.
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
    """A connection, whose lines are calls of `IVolumes`."""

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
    """Return a result in a form for JSON, for a volume its id."""
    return result.id if isinstance(result, VolumeDisk) else result


def serve(reactor: Any, connection: socket.socket) -> Any:
    """Serve one connection; this is all that a forked process does."""
    over: Deferred[None] = Deferred()
    factory = Factory.forProtocol(lambda: VolumeCalls(reactor, over))
    reactor.adoptStreamConnection(connection.fileno(), connection.family, factory)
    connection.close()
    return over


def main(provider: str, path: str) -> None:
    """Fork a process for each connection, until standard input ends, at the latest with the parent."""
    import_module(f"infranetes.providers.cloud.{provider}")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that the children need not be waited for
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
