# SPDX-License-Identifier: Apache-2.0
"""Resizing pods' VMs while they run.

kubelet asks before it raises containers' limits, and after it has lowered them. A resize that is reported as
done must be in force: the VM's own agent is asked for the VM's size, and takes memory out of use before the
provider does. A pod that gets less memory is recorded as smaller before its VM shrinks: if the daemon ends at
any time, kubelet asks the next one again, which continues from what the VM has.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from zope.interface import implementer

from infranetes.machines.interface import IAgent
from infranetes.pods.node.inventory import Container, Inventory, Sandbox
from infranetes.pods.node.node_providers import Providers
from infranetes.pods.store.states import ALIVE, SandboxState
from infranetes.pods.vm.huge_pages import huge_bytes
from infranetes.pods.vm.vm_size import RequestedSizes, limits_in, recorded_size
from infranetes.providers.interface import IGuest, IResizesVms, MemoryRange, Size
from infranetes_common.concurrency import backoff, sleep, start, to_its_end
from infranetes_common.errors import FailedPrecondition, InfranetesError, Unavailable
from infranetes_common.huge_pages import bytes_of
from infranetes_common.wire import cri

SETTLE_SECONDS = 30.0  # the longest wait for a guest to use what its hypervisor has given it
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0  # seconds between two questions to the guest's agent
_MIB = 1 << 20

_log = Logger()


@attrs.frozen(eq=False, repr=False)
class Resizer:
    """Serves UpdatePodSandboxResources. The calls for one sandbox are served one after the other."""

    _clock: IReactorTime
    _inventory: Inventory
    _providers: Providers
    _sizes: RequestedSizes

    async def resize(
        self, sandbox: Sandbox, resources: cri.LinuxContainerResources, overhead: cri.LinuxContainerResources
    ) -> None:
        """Resize the sandbox's VM to what the pod asks for. Sizes not given stay the same. Idempotent.

        :param resources: the sum of its containers' resources.
        :raise FailedPrecondition: the VM can't grow that much, or does not give back what it has.
        :raise InfranetesError: the VM is not known to have that size.
        """
        asked, complete = await self._sizes.of(sandbox, resources, overhead)
        async with sandbox.resizing:
            _check_ready(sandbox)
            before = size_now(sandbox)
            if not complete:  # unknown requests may need the memory that the VM has: keep it
                asked = attrs.evolve(asked, memory_bytes=max(asked.memory_bytes, before.memory_bytes))
            size = attrs.evolve(
                asked,
                cpu_millis=asked.cpu_millis or before.cpu_millis,
                memory_bytes=asked.memory_bytes or before.memory_bytes,
                huge_bytes=before.huge_bytes,
            )
            await self._provide(sandbox, before, size)
            _check_ready(sandbox)
            await self._record(sandbox, size)
        if size != before:
            _log.info(
                "sandbox {sandbox} is resized to {cpu} mCPU and {memory} MiB",
                sandbox=sandbox.id,
                pod=sandbox.pod,
                cpu=size.cpu_millis,
                memory=size.memory_bytes // _MIB,
            )

    async def make_room(self, container: Container, limits: cri.LinuxContainerResources) -> None:
        """Enlarge the VM to hold the huge pages of a container's limits as well. Idempotent.

        A VM whose provider can't resize it stays the same: its agent knows whether it has enough memory.

        :raise FailedPrecondition: the VM can't grow that much.
        :raise InfranetesError: the VM is not known to have that size.
        """
        sandbox = container.sandbox
        async with sandbox.resizing:
            _check_ready(sandbox)
            provider = self._providers.of(sandbox.record).provider
            before = attrs.evolve(size_now(sandbox, container), cpu_millis=0)
            size = attrs.evolve(before, huge_bytes=before.huge_bytes + bytes_of(limits))
            if not IResizesVms.providedBy(provider) or size == before:
                return
            has = await provider.resize(sandbox.record.instance_id, size)  # growing needs no IGuest
            _check_provided(sandbox, before, size, has)
            await self._check_in_force(sandbox, before, size)

    async def fit(self, container: Container, limits: cri.LinuxContainerResources) -> None:
        """Enlarge the VM to what its containers' limits need, with these of one of them. Idempotent.

        kubelet does not ask for that where a container of the pod has no limit. A VM that has enough anyway
        stays the same.

        :raise FailedPrecondition: the VM can't grow that much.
        :raise InfranetesError: the VM is not known to have that size.
        """
        sandbox = container.sandbox
        if sandbox.record.image or not (limits.memory_limit_in_bytes > 0 or limits.cpu_quota > 0):
            return
        async with sandbox.resizing:
            _check_ready(sandbox)
            before, needed = size_now(sandbox), _needed(container, limits)
            size = attrs.evolve(
                before,
                cpu_millis=max(before.cpu_millis, needed.cpu_millis),
                memory_bytes=max(before.memory_bytes, needed.memory_bytes),
            )
            if not await self._lacks(sandbox, before, size):
                return
            await self._provide(sandbox, before, size)
            await self._record(sandbox, size)
        _log.info(
            "sandbox {sandbox} has grown to {cpu} mCPU and {memory} MiB for its containers' limits",
            sandbox=sandbox.id,
            pod=sandbox.pod,
            cpu=size.cpu_millis,
            memory=size.memory_bytes // _MIB,
        )

    async def _provide(self, sandbox: Sandbox, before: Size, size: Size) -> None:
        """Resize the VM. One whose provider can't resize it must have enough anyway.

        :raise FailedPrecondition: it has not."""
        provider = self._providers.of(sandbox.record).provider
        if IResizesVms.providedBy(provider):
            await self._resize(provider, sandbox, before, size)
            return
        lacks = await self._lacks(sandbox, before, size)
        if lacks:
            raise FailedPrecondition(
                f"sandbox {sandbox.id}: its VM {lacks}, and VMs of {provider.name} can't grow while they "
                "run: recreate the pod"
            )

    async def _resize(self, provider: IResizesVms, sandbox: Sandbox, before: Size, size: Size) -> None:
        shrinks = size.memory_bytes < before.memory_bytes
        if shrinks:
            await self._record(sandbox, attrs.evolve(before, memory_bytes=size.memory_bytes))
        try:
            has = await self._provided(provider, sandbox, before, size)
            _check_provided(sandbox, before, size, has)
            await self._check_in_force(sandbox, before, size)
        except Exception:
            if shrinks and sandbox.state is SandboxState.READY:
                await to_its_end(start(self._take_back(provider, sandbox, before)))  # in its turn
            raise

    async def _take_back(self, provider: IResizesVms, sandbox: Sandbox, before: Size) -> None:
        """Undo a failed shrinking: give the VM back whatever memory it has released."""
        await self._record(sandbox, before)
        try:
            await provider.resize(sandbox.record.instance_id, before, _Guest(sandbox))
        except InfranetesError as error:
            _log.error(
                "the VM of sandbox {sandbox}, which could not be made smaller, may not have all its memory "
                "back: {error}",
                sandbox=sandbox.id,
                error=str(error),
            )

    async def _provided(self, provider: IResizesVms, sandbox: Sandbox, before: Size, size: Size) -> Size:
        try:
            return await provider.resize(sandbox.record.instance_id, size, _Guest(sandbox))
        except InfranetesError as error:
            if size.memory_bytes >= before.memory_bytes:
                raise
            kept, less = before.memory_bytes // _MIB, size.memory_bytes // _MIB
            raise type(error)(
                f"sandbox {sandbox.id}: its VM keeps {kept} MiB for the pod, not {less}: {error}"
            ) from None

    async def _record(self, sandbox: Sandbox, size: Size) -> None:
        resized = attrs.evolve(sandbox.record, cpu_millis=size.cpu_millis, memory_bytes=size.memory_bytes)
        await self._inventory.save(sandbox, resized)

    async def _check_in_force(self, sandbox: Sandbox, before: Size, size: Size) -> None:
        """Wait until the guest uses what it was given. :raise Unavailable: it does not in time."""
        clock = self._clock
        deadline = clock.seconds() + SETTLE_SECONDS
        pauses = backoff(FIRST_PAUSE, LONGEST_PAUSE)
        while True:
            lacks = await self._lacks(sandbox, before, size)
            if not lacks:
                return
            if clock.seconds() > deadline:
                raise Unavailable(
                    f"sandbox {sandbox.id}: its VM was given more, but the guest {lacks} "
                    f"{SETTLE_SECONDS:g} s later; it is asked again with the next try"
                )
            await sleep(clock, next(pauses))

    async def _lacks(self, sandbox: Sandbox, before: Size, size: Size) -> str:
        """Return what the guest lacks, as a message, of the resources that grow; "" if it lacks nothing."""
        more_cpu = size.cpu_millis > before.cpu_millis
        more_memory = size.all_bytes > before.all_bytes
        if not (more_cpu or more_memory):
            return ""
        info = await _agent(sandbox).info()
        cpus = -(-size.cpu_millis // 1000)
        if more_cpu and info.cpus < cpus:
            return f"has {info.cpus} processors of {cpus}"
        # Up to a sixteenth may be missing: the kernel keeps memory for itself before it counts the rest.
        if more_memory and info.memory_bytes < size.all_bytes // 16 * 15:
            return f"has {info.memory_bytes // _MIB} MiB of {size.all_bytes // _MIB}"
        return ""


@implementer(IGuest)
class _Guest:
    """A sandbox's guest, reached through its agent."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    async def release(self, ranges: Sequence[MemoryRange], seconds: float) -> None:
        await _agent(self._sandbox).release_memory(ranges, seconds)

    async def restore(self, ranges: Sequence[MemoryRange]) -> None:
        await _agent(self._sandbox).restore_memory(ranges)

    async def use_processors(self, count: int) -> None:
        await _agent(self._sandbox).use_processors(count)


def _agent(sandbox: Sandbox) -> IAgent:
    if sandbox.client is None:
        raise Unavailable(f"the agent of sandbox {sandbox.id} is no longer connected")
    return sandbox.client


def _check_ready(sandbox: Sandbox) -> None:
    if sandbox.state is not SandboxState.READY:
        raise FailedPrecondition(
            f"sandbox {sandbox.id} is {sandbox.state.value}: only one that is ready can be resized"
        )


def size_now(sandbox: Sandbox, without: Container | None = None) -> Size:
    """Return the size for which the pod was made or last resized, with its containers' huge pages.

    :param without: a container whose huge pages are not counted."""
    return attrs.evolve(recorded_size(sandbox), huge_bytes=huge_bytes(sandbox, without))


def _needed(container: Container, limits: cri.LinuxContainerResources) -> Size:
    """Return what the limits of the pod's containers are together. :param limits: new ones of `container`."""
    cpu_millis = memory = 0
    for other in container.sandbox.containers.values():
        if other is container or other.state in ALIVE:
            has = limits_in(other.limits)
            new = limits_in(limits) if other is container else has
            cpu_millis += new.cpu_millis or has.cpu_millis
            memory += new.memory_bytes or has.memory_bytes
    return Size(cpu_millis, memory)


def _check_provided(sandbox: Sandbox, before: Size, size: Size, has: Size) -> None:
    """Check that the VM has the wanted size, as far as that changes.

    :raise FailedPrecondition: it has not."""
    parts = (
        ("MiB", _MIB, before.all_bytes, size.all_bytes, has.all_bytes),
        ("mCPU", 1, before.cpu_millis, size.cpu_millis, has.cpu_millis),
    )
    for unit, one, old, new, real in parts:
        if new > old and real < new:
            raise FailedPrecondition(
                f"sandbox {sandbox.id}: its VM can have {real // one} {unit} for the pod, not {new // one}"
            )
        if new < old and real > new:
            raise FailedPrecondition(
                f"sandbox {sandbox.id}: its VM keeps {real // one} {unit} for the pod and does not give them "
                f"back while it runs: recreate the pod to have {new // one}"
            )
