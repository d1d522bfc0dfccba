# SPDX-License-Identifier: Apache-2.0
"""The observer that is told what the daemon does: launches, calls, losses.

The code that tells it knows nothing of metrics and pages; those are in `infranetes.monitoring`. Each step,
method, outcome and reason that an observer is told is a word of a closed set, fit for a metric's label.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

import attrs
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IReactorTime

from infranetes.tracing.spans import Kind, step
from infranetes_common import errors

T = TypeVar("T")

OK = "ok"
"""The outcome of a call that did what was asked."""
CANCELLED = "cancelled"
"""The reason of a failure, or the outcome of a call, whose result nobody waited for any more."""


class LaunchKind(enum.Enum):
    """What a launch is for."""

    NEW = "new"  # a pod, whose VM is made for it
    CLAIMED = "claimed"  # a pod whose VM was there: it is the pool's, or was launched by an earlier daemon
    STARTED = "started"  # a pod that gets a stopped VM of the pool, which is started for it
    POOL = "pool"  # a VM that will wait in the pool


class LaunchStep(enum.Enum):
    """The steps of a launch, in their order. Not every kind of launch has all of them."""

    PREPARE = "prepare"  # the provider has started, and what the VM is made of is known
    TURN = "turn"  # other pods' starts are waited for
    REQUEST = "request"  # the provider accepts the request for the VM
    BOOT = "boot"  # the VM runs and has an address
    AGENT = "agent"  # its agent answers
    CONFIGURE = "configure"  # the VM is configured for the pod, or warmed up for the pool
    NETWORK = "network"  # the pod's network and firewall
    EVENTS = "events"  # the agent's stream of events is live
    RECORD = "record"  # host ports, and the record on the disk


@attrs.frozen
class Launch:
    """A launch that has ended.

    :ivar id: of the sandbox that has the VM, or will have it.
    :ivar pod: its namespace and name; "": the VM is the pool's.
    :ivar began: seconds since 1970. :ivar steps: the seconds of each, in their order.
    :ivar reason: why it failed: a status such as ``unavailable``, or ``cancelled``; "": it didn't.
    :ivar message: why it failed, for people."""

    id: str
    pod: str
    provider: str
    kind: LaunchKind
    began: float
    steps: tuple[tuple[LaunchStep, float], ...] = ()
    reason: str = ""
    message: str = ""

    @property
    def seconds(self) -> float:
        """How long it took."""
        return sum(seconds for _, seconds in self.steps)


class Observer(Protocol):
    """Observes what the daemon does, in the reactor's thread. Methods must neither fail nor take long."""

    def launched(self, launch: Launch) -> None:
        """Called when a launch has ended, in success or failure."""

    def answered(self, service: str, method: str, code: str, seconds: float) -> None:
        """Called when an RPC was answered. :param code: the status, such as ``OK``."""

    def provider_called(self, provider: str, method: str, outcome: str, seconds: float) -> None:
        """Called when a method of `IPodProvider` has ended.

        :param outcome: `OK`, or the status of its error, such as ``unavailable``."""

    def cloud_known(
        self, cloud: str, calls: Iterable[tuple[str, str]], retries: Iterable[tuple[str, str]]
    ) -> None:
        """Called once for each cloud, before any request to it.

        :param calls: each action and outcome that `cloud_called` may be told.
        :param retries: each action and reason that `cloud_retried` may be told."""

    def cloud_called(self, cloud: str, action: str, outcome: str, waited: float, seconds: float) -> None:
        """Called when a request to a cloud has ended.

        :param outcome: `OK`, or a failure such as ``throttled``.
        :param waited: seconds until it was its turn. :param seconds: from then until the answer."""

    def cloud_retried(self, cloud: str, action: str, reason: str) -> None:
        """Called when a request to a cloud is repeated, or replaced by another one."""

    def agent_lost(self, provider: str) -> None:
        """Called when the agent of a pod's VM can't be reached any more."""

    def orphan_ended(self, provider: str) -> None:
        """Called when a VM without a record was destroyed."""


class NullObserver:
    """An `Observer` that does nothing with what it is told."""

    def launched(self, launch: Launch) -> None:
        pass

    def answered(self, service: str, method: str, code: str, seconds: float) -> None:
        pass

    def provider_called(self, provider: str, method: str, outcome: str, seconds: float) -> None:
        pass

    def cloud_known(
        self, cloud: str, calls: Iterable[tuple[str, str]], retries: Iterable[tuple[str, str]]
    ) -> None:
        pass

    def cloud_called(self, cloud: str, action: str, outcome: str, waited: float, seconds: float) -> None:
        pass

    def cloud_retried(self, cloud: str, action: str, reason: str) -> None:
        pass

    def agent_lost(self, provider: str) -> None:
        pass

    def orphan_ended(self, provider: str) -> None:
        pass


NULL_OBSERVER: Observer = NullObserver()


def reason_of(error: BaseException) -> str:
    """Return a failure's reason: its status, or ``cancelled`` if nobody waited for the result any more."""
    return CANCELLED if isinstance(error, CancelledError) else errors.code_of(error).name.lower()


async def call_to_provider(
    observer: Observer, clock: IReactorTime, provider: str, method: str, call: Callable[[], Deferred[T]]
) -> T:
    """Make a call, as a span where traces are recorded, and tell the observer how it ended."""
    began, outcome = clock.seconds(), OK
    try:
        with step(f"{provider}: {method}", Kind.CLIENT, {"infranetes.provider": provider}):
            return await call()
    except Exception as error:
        outcome = reason_of(error)
        raise
    finally:
        observer.provider_called(provider, method, outcome, clock.seconds() - began)
