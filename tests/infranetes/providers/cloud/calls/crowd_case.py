# SPDX-License-Identifier: Apache-2.0
"""Nodes of one account that call their cloud at the same time, on a virtual clock."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, TypeVar

from twisted.internet.defer import Deferred, execute
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from infranetes.providers.cloud.calls import calls
from infranetes.providers.cloud.calls.calls import Calls
from infranetes.providers.cloud.calls.throttle import RateLimit
from infranetes.providers.cloud.interface import Action, CloudError, Rate
from infranetes.providers.cloud.settings import CloudSettings
from infranetes_common.concurrency import start

T = TypeVar("T")

STEP = 0.01


class FakeCloud:
    """The part of a cloud that `Calls` uses."""

    name, location = "fake", "fake"

    def __init__(self, rates: Mapping[Action, Rate]) -> None:
        self.rates = rates

    def classify(self, error: Exception) -> CloudError | None:
        return None

    def _thd_connect(self, timeout: float) -> object:
        return object()

    def _thd_disconnect(self, driver: object) -> None:
        pass

    def _thd_is_current(self, driver: object) -> bool:
        return True


class CrowdCase(SynchronousTestCase):
    """Calls with a provider's default settings. :cvar rates: the cloud's."""

    rates: ClassVar[Mapping[Action, Rate]]

    def setUp(self) -> None:
        self.clock = Clock()

        def in_this_thread(reactor: object, pool: object, work: Callable[..., T], *args: Any) -> Deferred[T]:
            return execute(work, *args)

        self.patch(calls, "deferToThreadPool", in_this_thread)
        chance = random.Random(1).random  # noqa: S311
        self.patch(calls, "RateLimit", partial(RateLimit, chance=chance))

    def serve(self, action: Action, name: str) -> None:
        """Serve the request of a call about a VM. :raise CloudError: the cloud refuses it."""
        raise NotImplementedError

    def nodes(self, count: int) -> list[Calls[Any]]:
        return [Calls(self.clock, FakeCloud(self.rates), CloudSettings()) for _ in range(count)]  # type: ignore[arg-type]

    def call(self, node: Calls[Any], action: Action, name: str = "") -> Deferred[float]:
        """Make a call. The Deferred fires with the time at which it was served."""

        def work(driver: object) -> float:
            self.serve(action, name)
            return self.clock.seconds()

        return start(node.call(action.value, work, action=action))

    def all(self, count: int, nodes: Sequence[Calls[object]], action: Action) -> float:
        """Make so many calls at once, and return the seconds until the last one was served."""
        begun = self.clock.seconds()
        served = [self.call(nodes[number % len(nodes)], action, f"vm-{number}") for number in range(count)]
        while not all(each.called for each in served):
            self.clock.advance(STEP)
        return max(self.successResultOf(each) for each in served) - begun
