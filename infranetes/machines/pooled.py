# SPDX-License-Identifier: Apache-2.0
"""One VM of the pool, the pods that may have it, and the pace at which more are launched."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping

import attrs

from infranetes.machines.pod_machine import PodMachine
from infranetes.machines.pool_record import TO_STOP, PoolRecord, PoolState
from infranetes.providers.annotations import CONTAINERS, CPU, MEMORY, PREFIX
from infranetes.providers.interface import IPodProvider, Size, VmRequest
from infranetes.providers.stopping import IStopsVms
from infranetes_common.concurrency import Flight, backoff
from infranetes_common.errors import InvalidArgument
from infranetes_common.wire import cri

LONGEST_RETRY_SECONDS = 300.0
MINUTE = 60.0
RULES_SECONDS = 30.0  # how long to wait for the rules of Services, without which no pod gets the VM
# A pod whose annotations say how its VM is made can't get one of the pool, except with these annotations: the
# ContainerProvider is chosen when the pod gets its VM, and the sizes decide whether a VM fits.
_OF_ANY_VM = frozenset(PREFIX + name for name in (CONTAINERS, CPU.name, MEMORY.name))
_OWN_VM = re.compile(r"infranetes\.[^/]*|(?:[^/]*\.)?infranetes\.io/.*")


def wants_own_vm(annotations: Iterable[str]) -> bool:
    """Return whether annotations with these keys say how the pod's VM has to be made."""
    return any(_OWN_VM.fullmatch(key) for key in annotations if key not in _OF_ANY_VM)


def fits(size: Size, record: PoolRecord) -> bool:
    """Return whether a VM of the pool is large enough for a pod.

    A pod that asks for 0 takes any VM. A VM that was made with 0 has the provider's default size, which is
    not known here: it fits only pods that ask for 0."""
    return size.cpu_millis <= record.cpu_millis and size.all_bytes <= record.memory_bytes


@attrs.frozen
class Purpose:
    """The pods that a pool's VMs are for, and how the VMs are made."""

    handler: str = ""  # the handler whose pods get the VMs; "": all handlers without a pool of their own
    annotations: Mapping[str, str] = attrs.field(factory=dict)  # those that the VMs are made with
    contprovider: str = ""  # their ContainerProvider; "": the node's

    def request(self, size: Size) -> VmRequest:
        """Return what is asked of a VM of this size."""
        return VmRequest(size, annotations=self.annotations, granted=frozenset(self.annotations))


SHARED = Purpose()


def check_stops(provider: IPodProvider, annotations: Mapping[str, str]) -> None:
    """Check that VMs made with these annotations can wait stopped. :raise InvalidArgument: they can't."""
    if not IStopsVms.providedBy(provider):
        raise InvalidArgument(
            f"VMs of provider {provider.name} can't be stopped and started again; leave `stopped` out, and "
            "let VMs wait booted (`count`)"
        )
    provider.check_stoppable(VmRequest(annotations=annotations, granted=frozenset(annotations)))


class Pace:
    """The pace of launches: at most `per_minute`, and none for a while after a failure.

    :param retry: seconds of the first pause after a failure."""

    def __init__(self, per_minute: int, retry: float) -> None:
        self._begun: deque[float] = deque(maxlen=per_minute)
        self._retry = (retry, max(retry, LONGEST_RETRY_SECONDS))
        self._pauses = backoff(*self._retry)
        self._not_before = 0.0

    def wait(self, now: float) -> float:
        """Return the seconds until the next launch may begin; 0 if it may begin now."""
        until = self._not_before
        if len(self._begun) == self._begun.maxlen:
            until = max(until, self._begun[0] + MINUTE)
        return max(until - now, 0.0)

    def begun(self, now: float) -> None:
        """Count a launch that begins."""
        self._begun.append(now)

    def failed(self, now: float) -> None:
        """Pause after a failed launch, twice as long after each further one."""
        if now >= self._not_before:  # several that fail together count once
            self._not_before = now + next(self._pauses)

    def succeeded(self) -> None:
        """Make the next pause the shortest one again."""
        self._pauses = backoff(*self._retry)


class Member:
    """One VM of the pool.

    :ivar taken: whether a pod is about to claim it. :ivar failures: successive checks without an answer.
    """

    def __init__(self, record: PoolRecord, machine_for: Callable[[Member], PodMachine]) -> None:
        self.record = record
        self._machine_for = machine_for
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
        """The size that the VM was made for."""
        return Size(self.record.cpu_millis, self.record.memory_bytes)

    @property
    def is_to_stop(self) -> bool:
        """Whether the VM is stopped, or is to be."""
        return self.state in TO_STOP

    def has_stopped(self) -> None:
        """Take note that the VM is stopped: whoever starts it meets another agent."""
        before, self.machine = self.machine, self._machine_for(self)
        self.machine.instance, self.machine.timeline = before.instance, before.timeline

    async def make_ready(self, contprovider: str) -> None:
        """Have the VM do all that can be done before it is known which pod will have it.

        :param contprovider: what is to run its containers; "": the VM's default.
        :raise InfranetesError: its agent can't be asked, or fails."""
        await self.machine.replace_first_certificate()
        if contprovider:  # so that no pod waits for it to start
            await self.machine.configure(cri.PodSandboxConfig(), cri.DNSConfig(), contprovider)
        self.machine.tell_of_services()
        await self.machine.warm_up()
        await self.machine.has_rules(RULES_SECONDS)  # or the pod's first container would wait for them

    @property
    def zone(self) -> str:
        """The VM's zone; "" if the provider has not told it to this process."""
        return self.machine.instance.zone if self.machine.instance is not None else ""


def smallest(members: Iterable[Member], size: Size, zone: str) -> Member | None:
    """Return the smallest VM that fits a pod, and of those the oldest.

    :param zone: where it has to be; "": anywhere."""
    fitting = [member for member in members if fits(size, member.record) and zone in ("", member.zone)]

    def waste(member: Member) -> tuple[int, int, int]:
        return member.record.memory_bytes, member.record.cpu_millis, member.record.created_at

    return min(fitting, key=waste, default=None)
