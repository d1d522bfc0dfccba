# SPDX-License-Identifier: Apache-2.0
"""A daemon's volumes alone, in a process that can be killed.

`python -m tests.support.volume_daemon` reads JSON, a line each: first
`{"number", "provider", "table", "cluster", "node", "root"}`, then calls of `IVolumes`, `{"number", "call",
"arguments"}`. Each is answered by a line with its number and `result`, or `error`, the name of the error's
class, and `words`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from twisted.internet import stdio
from twisted.internet.defer import Deferred
from twisted.internet.task import react
from twisted.protocols.basic import LineOnlyReceiver

from infranetes.providers import registry
from infranetes.providers.interface import IPodProvider, ProviderContext
from infranetes.providers.volumes import IHasVolumes, VolumeDisk
from infranetes_common.concurrency import start
from infranetes_common.reactors import IReactor


class VolumeCalls(LineOnlyReceiver):
    """The standard input and output."""

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
        self._tell(0, result=None)

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


def main(reactor: Any) -> Any:
    """The whole program."""
    over: Deferred[None] = Deferred()
    stdio.StandardIO(VolumeCalls(reactor, over))
    return over


if __name__ == "__main__":
    react(main)
