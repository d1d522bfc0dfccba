# SPDX-License-Identifier: Apache-2.0
"""A process that writes one log until it is killed: python -m tests.infranetes.logs.child DIRECTORY LINES.

The agent's records are a function of the cursor, so every process reads the same. The checkpoint is a file.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.task import deferLater, react

from infranetes.logs import Checkpoint, ContainerLog
from infranetes_common.wire import vmserver
from tests.infranetes.logs.log_scenario import record


def line(number: int) -> Any:
    return record(number, b"line %d " % number + b"x" * (number * 7919 % 300), stream=number % 2)


async def main(reactor: Any, directory: str, lines: str) -> None:
    kept = Path(directory) / "checkpoint.json"

    async def read(cursor: str) -> AsyncGenerator[vmserver.LogRecord, None]:
        for number in range(int(cursor or 0) + 1, int(lines) + 1):
            if number % 500 == 0:
                await deferLater(reactor, 0.001)
            yield line(number)

    async def save(checkpoint: Checkpoint) -> None:
        new = kept.with_suffix(".new")
        new.write_text(json.dumps([checkpoint.cursor, checkpoint.inode, checkpoint.size]))
        os.replace(new, kept)

    checkpoint = Checkpoint(*json.loads(kept.read_text())) if kept.exists() else None
    log = ContainerLog(reactor, Path(directory) / "0.log", read, checkpoint, save)

    def rotated() -> None:
        """The parent has renamed the file; it removes the request once there is a new one."""
        request = Path(directory) / "reopen"
        if request.exists():
            done = Deferred.fromCoroutine(log.reopen())
            done.addCallback(lambda _: request.unlink(missing_ok=True))
        reactor.callLater(0.005, rotated)

    rotated()
    log.start()
    await log.finished


if __name__ == "__main__":
    react(lambda reactor, *arguments: Deferred.fromCoroutine(main(reactor, *arguments)), sys.argv[1:])
