# SPDX-License-Identifier: Apache-2.0
"""SIGHUP: the request to read the configuration again.

After `Hangups.install`, SIGHUP never ends the process. Requests that arrive before the daemon can reload are
served once it can. Requests during a reload cause one more reload. While the daemon ends, they are ignored.
"""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable, Mapping

import attrs
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IReactorFromThreads
from twisted.logger import Logger
from twisted.python.failure import Failure

from infranetes_common.concurrency import start

_log = Logger()


class Hangups:
    """Calls a coroutine function for each SIGHUP, one call at a time."""

    def __init__(self, reactor: IReactorFromThreads) -> None:
        self._reactor = reactor
        self._reload: Callable[[], Awaitable[None]] | None = None
        self._running: Deferred[None] | None = None
        self._requested = False
        self._installed = False

    def install(self) -> None:
        """Catch the signal from now on. Call it in the main thread."""
        signal.signal(signal.SIGHUP, lambda _number, _frame: self._reactor.callFromThread(self.request))
        self._installed = True

    def serve(self, reload: Callable[[], Awaitable[None]]) -> None:
        """Call `reload` for past and future requests."""
        self._reload = reload
        if self._requested:
            self.request()

    def stop(self) -> None:
        """Cancel a reload that is under way, and ignore the signal until the process has ended."""
        self._reload = None
        if self._installed:
            # Ignore the signal: when the interpreter ends, it would restore the default in place of a
            # handler.
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        if self._running is not None:
            self._running.cancel()

    def request(self) -> None:
        """Reload now, or once that is possible."""
        self._requested = True
        if self._reload is None or self._running is not None:
            return
        self._requested = False
        self._running = start(_awaited(self._reload()))
        self._running.addBoth(self._done)

    def _done(self, result: object) -> None:
        self._running = None
        if isinstance(result, Failure) and not result.check(CancelledError):
            _log.failure("the configuration could not be reloaded", failure=result)
        if self._requested:
            self.request()


async def _awaited(work: Awaitable[None]) -> None:
    await work


def differences(old: object, new: object, prefix: str = "") -> list[str]:
    """Return the dotted keys in which two instances of a configuration class differ, sorted."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        keys = [*old, *(key for key in new if key not in old)]
        pairs = [(str(key), old.get(key), new.get(key)) for key in keys]
    elif attrs.has(cls := type(old)) and cls is type(new):
        names = [attribute.name for attribute in attrs.fields(cls)]
        pairs = [(name, getattr(old, name), getattr(new, name)) for name in names]
    else:
        return [] if old == new else [prefix]
    inner = (differences(a, b, f"{prefix}.{key}" if prefix else key) for key, a, b in pairs)
    return sorted(key for keys in inner for key in keys)


def report(log: Logger, origin: str, taken: list[str], waiting: list[str]) -> None:
    """Log the result of a reload: one line, and one for each key that needs a restart."""
    for key in waiting:
        log.warn(
            "{origin}: {key} has changed: it takes effect when the daemon is restarted",
            origin=origin,
            key=key,
        )
    if taken:
        words = f"{', '.join(taken)} {'is' if len(taken) == 1 else 'are'} in force"
    else:
        words = "nothing else has changed" if waiting else "nothing has changed"
    log.info("{origin} was read again: {words}", origin=origin, words=words)


def refuse(log: Logger, error: Exception) -> None:
    """Log why a reload did nothing: one line for each fault."""
    for line in str(error).splitlines():
        log.error("the configuration is not reloaded, everything stays as it was: {line}", line=line)
