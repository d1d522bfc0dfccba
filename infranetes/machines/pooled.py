# SPDX-License-Identifier: Apache-2.0
"""One VM of the pool, which pods may have it, and how fast more are launched."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping

import attrs

from infranetes.machines.pod_machine import PodMachine
from infranetes.machines.pool_record import PoolRecord, PoolState
from infranetes.providers.annotations import CONTAINERS, CPU, MEMORY, PREFIX
from infranetes.providers.interface import Size
from infranetes_common.concurrency import Flight, backoff
from infranetes_common.wire import cri

LONGEST_RETRY_SECONDS = 300.0
MINUTE = 60.0
RULES_SECONDS = 30.0  # for which a VM without the rules of Services is no pod's
# What a pod says about its own VM. Those of the pool were made without it. What runs containers in a VM is
# chosen when a pod has it, and how large a VM is says whether it fits.
_OF_ANY_VM = frozenset(PREFIX + name for name in (CONTAINERS, CPU.name, MEMORY.name))
_OWN_VM = re.compile(r"infranetes\.[^/]*|(?:[^/]*\.)?infranetes\.io/.*")


def wants_own_vm(annotations: Iterable[str]) -> bool:
    """Whether a pod with these annotations (keys) says how its VM is to be made."""
    return any(_OWN_VM.fullmatch(key) for key in annotations if key not in _OF_ANY_VM)


def fits(asked: Size, had: PoolRecord) -> bool:
    """Whether a VM of the pool is large enough for a pod.

    A pod that asks for 0 takes any. A VM that was made with 0 has the provider's default, which is not
    known here: it fits only pods that ask for 0."""
    return asked.cpu_millis <= had.cpu_millis and asked.all_bytes <= had.memory_bytes


@attrs.frozen
class Purpose:
    """Whose pods may have the VMs of a pool, and how these are made for them."""

    handler: str = ""  # "": those that none of the other pools is for
    annotations: Mapping[str, str] = attrs.field(factory=dict)  # that the VMs are made with
    contprovider: str = ""  # what runs containers in them; "": what the node has


SHARED = Purpose()


class Pace:
    """Spaces launches: so many in a minute, and none for a while after a failure."""

    def __init__(self, per_minute: int, retry: float) -> None:
        self._begun: deque[float] = deque(maxlen=per_minute)
        self._retry = (retry, max(retry, LONGEST_RETRY_SECONDS))
        self._pauses = backoff(*self._retry)
        self._not_before = 0.0

    def wait(self, now: float) -> float:
        """Return the seconds until the next launch may begin; 0: now."""
        until = self._not_before
        if len(self._begun) == self._begun.maxlen:
            until = max(until, self._begun[0] + MINUTE)
        return max(until - now, 0.0)

    def begun(self, now: float) -> None:
        """Count a launch that begins."""
        self._begun.append(now)

    def failed(self, now: float) -> None:
        """Pause after a launch that failed; twice as long after each one that follows."""
        if now >= self._not_before:  # launches that fail together count once
            self._not_before = now + next(self._pauses)

    def succeeded(self) -> None:
        """Begin the next pause from the shortest."""
        self._pauses = backoff(*self._retry)


class Member:
    """One VM of the pool.

    :ivar taken: a pod is about to have it. :ivar failures: checks in a row that its agent did not answer.
    """

    def __init__(self, record: PoolRecord, machine_for: Callable[[Member], PodMachine]) -> None:
        self.record = record
        self.machine = machine_for(self)
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

    async def make_ready(self, contprovider: str) -> None:
        """Have the VM do all that can be done before it is known which pod will have it.

        :param contprovider: what is to run its containers; "": what is there.
        :raise InfranetesError: its agent can't be asked, or fails."""
        await self.machine.renew_certificate()
        if contprovider:  # so that no pod waits for its start
            await self.machine.configure(cri.PodSandboxConfig(), cri.DNSConfig(), contprovider)
        self.machine.tell_of_services()
        await self.machine.warm_up()
        await self.machine.has_rules(RULES_SECONDS)  # a pod's first container waits for them too

    @property
    def zone(self) -> str:
        """Where it is; "": the provider has not told this process."""
        return self.machine.instance.zone if self.machine.instance is not None else ""


def smallest(members: Iterable[Member], size: Size, zone: str) -> Member | None:
    """Return the smallest VM that fits a pod, and of those the oldest.

    :param zone: where it has to be; "": anywhere."""
    fitting = [one for one in members if fits(size, one.record) and zone in ("", one.zone)]

    def waste(member: Member) -> tuple[int, int, int]:
        return member.record.memory_bytes, member.record.cpu_millis, member.record.created_at

    return min(fitting, key=waste, default=None)
