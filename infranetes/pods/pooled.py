"""One VM of the pool, which pods may have it, and how fast more are made."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable

from infranetes.pods.inventory import HasVm
from infranetes.pods.records import PoolRecord
from infranetes.pods.states import PoolState
from infranetes.pods.waits import Flight
from infranetes.providers.interface import Size

LONGEST_RETRY_SECONDS = 300.0
MINUTE = 60.0
# What a pod says about its own VM: one of the pool was made without it.
_OWN_VM = re.compile(r"infranetes\.[^/]*|(?:[^/]*\.)?infranetes\.io/.*")


def wants_own_vm(annotations: Iterable[str]) -> bool:
    """Whether a pod with these annotations (keys) says how its VM is to be made."""
    return any(_OWN_VM.fullmatch(key) for key in annotations)


def fits(asked: Size, had: PoolRecord) -> bool:
    """Whether a VM of the pool has what is asked for. 0 asks for nothing; 0 had is the provider's default,
    which nobody here knows, so it fits only who asks for nothing."""
    return asked.cpu_millis <= had.cpu_millis and asked.memory_bytes <= had.memory_bytes


class Pace:
    """When the next launch may begin: so many in a minute, and none for a while after a failure."""

    def __init__(self, per_minute: int, retry: float) -> None:
        self._begun: deque[float] = deque(maxlen=per_minute)
        self._first_retry = retry
        self._retry = retry
        self._not_before = 0.0

    def wait(self, now: float) -> float:
        """Seconds until the next may begin; 0: now."""
        until = self._not_before
        if len(self._begun) == self._begun.maxlen:
            until = max(until, self._begun[0] + MINUTE)
        return max(until - now, 0.0)

    def begun(self, now: float) -> None:
        """One begins."""
        self._begun.append(now)

    def failed(self, now: float) -> None:
        """One has failed: each after it doubles the pause."""
        if now >= self._not_before:  # those that fail together count once
            self._not_before = now + self._retry
            self._retry = min(self._retry * 2, LONGEST_RETRY_SECONDS)

    def succeeded(self) -> None:
        """One has not failed."""
        self._retry = self._first_retry


class Member(HasVm):
    """One VM of the pool.

    :ivar taken: a pod is about to have it. :ivar failures: looks in a row that its agent missed.
    """

    def __init__(self, record: PoolRecord) -> None:
        super().__init__()
        self.record = record
        self.taken = False
        self.failures = 0
        self.booting: Flight[None] | None = None
        self.ending: Flight[None] | None = None

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def state(self) -> PoolState:
        return self.record.state

    @property
    def size(self) -> Size:
        """What it was made for."""
        return Size(self.record.cpu_millis, self.record.memory_bytes)
