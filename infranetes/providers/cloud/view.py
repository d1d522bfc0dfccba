"""What is known of the VMs: the cloud's answers, put together. No I/O.

A cloud's answers may be older than others that came before, and may lack a VM that was just made. So a
VM's state only ever moves on, and one that was launched a moment ago is there even if a list lacks it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import attrs

from infranetes.providers.cloud.interface import Found
from infranetes.providers.interface import InstanceState

_ORDER = list(InstanceState)


@attrs.define(eq=False)
class Known:
    """One VM."""

    found: Found
    launched_at: float | None = None  # when we asked for it; None: an earlier daemon did
    told: bool = False  # its end, or it had ended when it was first seen
    missed: int = 0  # times in a row that it was not in a list though it had to be


@attrs.define
class View:
    """VMs by id.

    :param now: seconds. :param settle: how old the cloud's answers may be, in seconds.
    """

    now: Callable[[], float]
    settle: float
    vms: dict[str, Known] = attrs.field(factory=dict)
    destroyed: dict[str, str] = attrs.field(factory=dict)  # ids and their tokens: gone for good
    destroyed_at: dict[str, float] = attrs.field(factory=dict)  # when, of those that we destroyed
    news: set[str] = attrs.field(factory=set)  # ids of VMs that changed
    began: float = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.began = self.now()

    def launched(self, found: Found) -> Found:
        """A VM that we have just asked for."""
        merged = self.put(found)
        self.vms[found.id].launched_at = self.now()
        return merged

    def put(self, found: Found) -> Found:
        """The cloud says this of a VM that is not destroyed; what is true of it."""
        known = self.vms.get(found.id)
        if known is None:
            self.vms[found.id] = Known(found, told=found.state is InstanceState.ENDED)
            return found
        known.missed = 0
        if _ORDER.index(found.state) >= _ORDER.index(known.found.state):
            before = known.found
            after = attrs.evolve(
                found,
                private_address=found.private_address or before.private_address,
                public_address=found.public_address or before.public_address,
                created_at=before.created_at or found.created_at,
                detail=found.detail or before.detail,
            )
            if after != before:
                known.found = after
                self.news.add(found.id)
        return known.found

    def merge(self, founds: Iterable[Found]) -> list[Found]:
        """What there is, the cloud's list being `founds`."""
        founds = list(founds)
        for one in founds:
            self._check_destroyed(one)
        now = [self.put(one) for one in founds if one.id not in self.destroyed]
        ids = {one.id for one in now}
        fresh = [
            known.found for known in self.vms.values() if known.found.id not in ids and self.is_fresh(known)
        ]
        return sorted([*now, *fresh], key=lambda one: (one.created_at, one.id))

    def _check_destroyed(self, found: Found) -> None:
        """A VM that is said to be gone, and that the cloud shows alive for longer than its answers may be
        old, is not gone: better to end it once more than to pay for it for ever."""
        if found.state is InstanceState.ENDED or found.id not in self.destroyed:
            return
        if self.now() - self.destroyed_at.get(found.id, self.began) > self.settle:
            del self.destroyed[found.id]

    def is_fresh(self, known: Known) -> bool:
        """Whether the cloud's answers may not know of it yet."""
        return known.launched_at is not None and self.now() - known.launched_at < self.settle

    def of_token(self, token: str) -> Found | None:
        """The VM of a token: one that has not ended, if there is one."""
        mine = [known.found for known in self.vms.values() if known.found.token == token]
        return min(mine, key=lambda one: (_ORDER.index(one.state), one.created_at, one.id), default=None)

    def twins(self) -> list[Found]:
        """VMs that are not the first of their token: to be destroyed. The one that a launch was
        answered with stays; else the oldest."""
        live: dict[str, list[Known]] = {}
        for known in self.vms.values():
            if known.found.state is not InstanceState.ENDED and known.found.token:
                live.setdefault(known.found.token, []).append(known)
        extra: list[Found] = []
        for same in live.values():
            same.sort(key=lambda one: (one.launched_at is None, one.found.created_at, one.found.id))
            extra += [one.found for one in same[1:]]
        return extra

    def live(self) -> list[Known]:
        """VMs that have not ended."""
        return [known for known in self.vms.values() if known.found.state is not InstanceState.ENDED]

    def lost(self, known: Known, detail: str) -> None:
        """The cloud knows nothing of a VM that was there."""
        known.found = attrs.evolve(known.found, state=InstanceState.ENDED, detail=detail)
        self.news.add(known.found.id)

    def gone(self, id: str, token: str) -> None:
        """A VM is destroyed."""
        self.vms.pop(id, None)
        self.news.add(id)
        self.destroyed[id] = token
        self.destroyed_at[id] = self.now()

    def count_destroyed(self, token: str) -> int:
        """How many VMs of a token were destroyed."""
        return sum(one == token for one in self.destroyed.values())
