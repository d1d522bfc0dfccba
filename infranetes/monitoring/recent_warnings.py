# SPDX-License-Identifier: Apache-2.0
"""The last warnings and errors of the daemon's log, kept in memory for the page."""

from __future__ import annotations

from collections import deque

import attrs
from twisted.logger import ILogObserver, LogEvent, LogLevel, globalLogPublisher
from zope.interface import implementer

from infranetes_common.logging import message

KEPT = 50
MAX_TEXT = 400  # characters of one entry
_LEVELS = (LogLevel.warn, LogLevel.error, LogLevel.critical)


@attrs.frozen
class Warned:
    """A warning or an error of the log. :ivar at: seconds since 1970. :ivar text: without secrets."""

    at: float
    level: str
    text: str


@implementer(ILogObserver)
class RecentWarnings:
    """Keeps the last warnings and errors. :ivar kept: the newest last."""

    def __init__(self) -> None:
        self.kept: deque[Warned] = deque(maxlen=KEPT)

    def __call__(self, event: LogEvent) -> None:
        if event.get("log_level") in _LEVELS:
            text = " ".join(message(event).split())[:MAX_TEXT]
            self.kept.append(Warned(event["log_time"], event["log_level"].name, text))

    def start(self) -> None:
        """Begin to listen to the log."""
        globalLogPublisher.addObserver(self)

    def stop(self) -> None:
        """Stop listening."""
        globalLogPublisher.removeObserver(self)
