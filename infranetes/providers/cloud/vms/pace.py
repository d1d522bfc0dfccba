# SPDX-License-Identifier: Apache-2.0
"""When VMs that may have ended are looked at, and how a cloud's refusals stretch all pauses. No I/O.

A list is a node's dearest call: it is answered from the account's quota, which all nodes share. So it is made
rarely, and a VM's end is learned from its agent, whose connection breaks with it: this raises a *doubt*, and
the VM is looked at until the cloud says that it has ended, or its agent is heard again.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection

import attrs

FIRST_LOOK = 3.0  # seconds after a doubt was raised: an agent that starts again is back by then
_GROWTH = 2.0  # of the pause between two looks at the same VM
_SLOWER = 1.5  # what pauses are multiplied by when the cloud refused a look because of its rate
_FASTER = 0.9  # what they are multiplied by after each look that it did not refuse
_SLOWEST = 8.0
_SPREAD = 0.1  # of a pause at rest: by how much it varies, so that nodes do not list at the same time


@attrs.define
class _Doubt:
    next: float
    pause: float


class Doubts:
    """The VMs whose end nobody would tell, by their ids.

    :param now: seconds. :param longest: seconds between two looks at the same VM, at the most.
    """

    def __init__(self, now: Callable[[], float], longest: float) -> None:
        self._now = now
        self._longest = longest
        self._doubts: dict[str, _Doubt] = {}

    def __contains__(self, id: str) -> bool:
        return id in self._doubts

    def raise_for(self, id: str) -> None:
        """Have a VM looked at soon, and then less and less often. Idempotent."""
        pause = min(FIRST_LOOK, self._longest)
        self._doubts.setdefault(id, _Doubt(self._now() + pause, pause))

    def dismiss(self, id: str) -> None:
        """Have a VM looked at no more, as it was heard of. Idempotent."""
        self._doubts.pop(id, None)

    def keep(self, ids: Collection[str]) -> None:
        """Forget all other VMs."""
        self._doubts = {id: doubt for id, doubt in self._doubts.items() if id in ids}

    def due(self) -> list[str]:
        """Return the VMs to look at now."""
        now = self._now()
        return [id for id, doubt in self._doubts.items() if doubt.next <= now]

    def looked(self, ids: Collection[str], stretch: float) -> None:
        """Note that VMs which were due were looked at. :param stretch: of their pauses, as of `Stretch`."""
        for id in ids:
            if (doubt := self._doubts.get(id)) is not None:
                doubt.pause = min(doubt.pause * _GROWTH, self._longest)
                doubt.next = self._now() + doubt.pause * stretch

    @property
    def next(self) -> float:
        """When the next look is due; infinity: never."""
        return min((doubt.next for doubt in self._doubts.values()), default=math.inf)


class Stretch:
    """By how much pauses are longer than configured, because the cloud refuses looks: other nodes share its
    quota. Each refusal makes them longer, each look that is served makes them shorter again.

    :ivar factor: from 1 on. :param chance: a number from 0 to 1."""

    def __init__(self, chance: Callable[[], float] = random.random) -> None:
        self._chance = chance
        self.factor = 1.0

    def looked(self, refusals: int) -> None:
        """Note a look. :param refusals: how often it was refused before it was served, or given up."""
        if refusals:
            self.factor = min(self.factor * _SLOWER**refusals, _SLOWEST)
        else:
            self.factor = max(self.factor * _FASTER, 1.0)

    def at_rest(self, seconds: float) -> float:
        """Return a pause at rest, which is not the same twice. :param seconds: as configured."""
        return seconds * self.factor * (1.0 + _SPREAD * (2.0 * self._chance() - 1.0))
