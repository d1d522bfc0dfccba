"""A client that is attached to a container."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from vmserver.containers.fake.sessions import AttachSession
from vmserver.containers.interface import Streams


class Attached(AttachSession):
    """A container's streams; the end of its stdin is the logger's to make."""

    def __init__(
        self,
        reactor: Any,
        reading: AsyncIterator[Any],
        since: int,
        streams: Streams,
        stdin: Path | None,
        ended: Callable[[], int],
        end_stdin: Callable[[], None],
    ) -> None:
        super().__init__(reactor, reading, since, streams, stdin, 0, ended)
        self._end_stdin = end_stdin

    def close_stdin(self) -> None:
        had = self._fifo is not None
        super().close_stdin()
        if had:
            self._end_stdin()
