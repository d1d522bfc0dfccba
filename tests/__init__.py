"""Infranetes' tests; ``python -m tests`` runs them.

Twisted of Debian 12 does not await tests that are coroutines: it would call each of them passed
without having run it. Whoever imports a test gets a trial that does, on every Twisted.
"""

from __future__ import annotations

import os
from collections.abc import Coroutine
from typing import Any

from hypothesis import HealthCheck, settings
from twisted.internet import defer

# A noisy machine makes an example slow; that says nothing about the code. The build of a package and
# CI try the same examples each time, as newer releases of hypothesis do by themselves; everybody else's
# runs, and the fuzz target, look for new ones.
settings.register_profile(
    "infranetes",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=not os.environ.keys().isdisjoint({"CI", "SOURCE_DATE_EPOCH"}),
)
settings.load_profile("infranetes")


def _await_coroutines() -> None:
    original = defer.maybeDeferred

    async def probe() -> None:
        pass

    unawaited: list[Any] = []
    original(probe).addCallback(unawaited.append)
    if not isinstance(unawaited[0], Coroutine):
        return
    unawaited[0].close()

    def maybe_deferred(function: Any, *args: Any, **kwargs: Any) -> Any:
        def call() -> Any:
            result = function(*args, **kwargs)
            return defer.Deferred.fromCoroutine(result) if isinstance(result, Coroutine) else result

        return original(call)

    setattr(defer, "maybeDeferred", maybe_deferred)  # noqa: B010 - typed as an overloaded function


_await_coroutines()
