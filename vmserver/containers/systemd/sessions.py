# SPDX-License-Identifier: Apache-2.0
"""Sessions of clients that are attached to a container."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from pathlib import Path

from infranetes_common.reactors import IReactor
from infranetes_common.wire import vmserver as messages
from vmserver.containers.child_sessions import AttachSession
from vmserver.containers.interface import Streams


class UnitAttachSession(AttachSession):
    """The streams of a unit, whose stdin is held open by its logger.

    :param end_stdin: called for the logger to close stdin."""

    def __init__(
        self,
        reactor: IReactor,
        reading: AsyncGenerator[messages.LogRecord, None],
        since: int,
        streams: Streams,
        stdin: Path | None,
        ended: Callable[[], int],
        end_stdin: Callable[[], None],
    ) -> None:
        super().__init__(reactor, reading, since, streams, stdin, 0, ended)
        self._end_stdin = end_stdin

    def close_stdin(self) -> None:
        had_stdin = self._fifo is not None
        super().close_stdin()
        if had_stdin:
            self._end_stdin()
