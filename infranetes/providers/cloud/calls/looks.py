# SPDX-License-Identifier: Apache-2.0
"""Look-ups that share one call to the cloud when they ask about things at about the same time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from twisted.internet.defer import Deferred

from infranetes_common.concurrency import start

T = TypeVar("T")


class BatchedLookup(Generic[T]):
    """Looks things up by key. Keys that are asked for while a call is under way wait for the next call, whose
    answer is therefore never older than the question.

    :param call: returns what was found, for at most `most` different keys. :param key: the key of what was
        found.
    """

    def __init__(
        self, call: Callable[[Sequence[str]], Awaitable[Sequence[T]]], key: Callable[[T], str], most: int
    ) -> None:
        self._call = call
        self._key = key
        self._most = most
        self._waiting: dict[str, list[Deferred[list[T]]]] = {}
        self._running = False

    async def look(self, key: str) -> list[T]:
        """Return what there is with this key."""
        answer: Deferred[list[T]] = Deferred()
        self._waiting.setdefault(key, []).append(answer)
        if not self._running:
            self._running = True
            start(self._run())
        return await answer

    async def _run(self) -> None:
        while self._waiting:
            keys = list(self._waiting)[: self._most]
            waiting = [(key, answer) for key in keys for answer in self._waiting.pop(key)]
            found: dict[str, list[T]] = {key: [] for key in keys}
            failure: Exception | None = None
            try:
                for each in await self._call(keys):
                    found.setdefault(self._key(each), []).append(each)
            except Exception as error:
                failure = error
            for key, answer in waiting:
                if answer.called:
                    continue  # cancelled
                if failure is not None:
                    answer.errback(failure)
                else:
                    answer.callback(found[key])
        self._running = False
