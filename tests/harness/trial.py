# SPDX-License-Identifier: Apache-2.0
"""How trial is set up for these tests: each is held to the guards of `tests.harness.guards`, and tests may be
coroutines on every Twisted. (Debian 12's would call each of those passed without having run it.)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine
from typing import Any

from hypothesis import HealthCheck, settings
from twisted.internet import defer
from twisted.internet.defer import Deferred

from tests.harness.guards import guard_tests, run_class_fixtures
from tests.harness.needs import repetitions


def set_up_trial() -> None:
    """Set trial and hypothesis up, before any test is loaded."""
    _choose_examples()
    _await_coroutines()
    guard_tests()
    run_class_fixtures()


def _choose_examples() -> None:
    # A busy machine makes examples slow, which says nothing about the code. The build of a package and CI try
    # the same examples each time, as newer releases of hypothesis do by themselves; other runs look for new
    # ones, at night for many.
    settings.register_profile(
        "infranetes",
        max_examples=repetitions(25, nightly=500),
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        derandomize=not os.environ.keys().isdisjoint({"CI", "SOURCE_DATE_EPOCH"}),
    )
    settings.load_profile("infranetes")


def _await_coroutines() -> None:
    original = defer.maybeDeferred

    async def probe() -> None:
        pass

    unawaited: list[Any] = []  # Any: whatever this Twisted makes of a coroutine
    original(probe).addCallback(unawaited.append)
    if not isinstance(unawaited[0], Coroutine):
        return
    unawaited[0].close()

    def maybe_deferred(  # Any: it calls any function
        function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Deferred[Any]:
        def call() -> Any:
            result = function(*args, **kwargs)
            return defer.Deferred.fromCoroutine(result) if isinstance(result, Coroutine) else result

        return original(call)

    setattr(defer, "maybeDeferred", maybe_deferred)  # noqa: B010 - typed as an overloaded function
