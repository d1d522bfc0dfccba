# SPDX-License-Identifier: Apache-2.0
"""The Control service of ``proto/control.proto``, which infranetes-ctl calls.

Its answers quote errors and what clouds say, but without secrets. Consoles are as the guest wrote them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import cast

from twisted.logger import Logger
from twisted.python.failure import Failure

from infranetes.control.chosen import id_meant
from infranetes.machines.pod_machine import PodMachine
from infranetes.machines.pool import Pool
from infranetes.machines.pool_record import PoolRecord
from infranetes.machines.pooled import Member
from infranetes.pods.node.handlers import Handlers
from infranetes.pods.node.inventory import Inventory, PastSandbox, Sandbox
from infranetes.pods.node.node_providers import NodeProvider, Providers
from infranetes.pods.node.pools import Pools
from infranetes.pods.node.refusals import refusals
from infranetes.pods.reconcile import Orphan, Reconciler
from infranetes.pods.store.records import SandboxRecord
from infranetes.pods.store.states import WITH_VM, ContainerState, SandboxState
from infranetes.pods.vm.guest_view import way_of
from infranetes.pods.vm.vm_size import recorded_size
from infranetes.providers.interface import Console, IHasConsoles, Instance, Size
from infranetes_common.concurrency import settled, shielded, within
from infranetes_common.errors import FailedPrecondition, InfranetesError, InvalidArgument, NotFound
from infranetes_common.redaction import redacted
from infranetes_common.wire import control, cri
from infranetes_common.wire.control_rpcs import ControlNodeRpcs
from txgrpc import Call

REMOVED, FAILED = "removed", "failed"  # the states of pods that have no record any more
_NANOS = 10**9
_MAX_ID = 253
_MAX_CONSOLE = 256 * 1024  # the most characters of an answer

_log = Logger()


def size_words(size: Size) -> str:
    """Return a requested size in words; "" if none was requested."""
    parts = []
    if size.cpu_millis:
        parts.append(f"{size.cpu_millis / 1000:g} CPU")
    if size.memory_bytes:
        parts.append(f"{size.memory_bytes / 2**20:.0f} MiB")
    return ", ".join(parts)


def _had(machine: PodMachine) -> Size:
    """Return a VM's size as its own system has reported it."""
    info = machine.info
    return Size(info.cpus * 1000, info.memory_bytes) if info is not None else Size()


def shown_vm(
    instance: Instance | None,
    record: SandboxRecord | PoolRecord | None = None,
    size: str = "",
    provider: str = "",
) -> control.Vm:
    """Return a VM as the provider last showed it, or as its record has it if the provider did not yet.

    :param size: unless the provider has a word for it."""
    vm = control.Vm(size=size, provider=provider or (record.provider if record else ""))
    if record is not None:
        vm.id, vm.address, vm.created_at = record.instance_id, record.address, record.created_at
        vm.sandbox_id = record.id
    if instance is not None:
        vm.id, vm.state, vm.detail = instance.id, instance.state.value, redacted(instance.detail)
        vm.address = vm.address or instance.address  # a pod may have an address besides its VM's
        vm.sandbox_id = instance.sandbox_id
        vm.size = instance.size or vm.size
        vm.created_at = int(instance.created_at * _NANOS) or vm.created_at
        if instance.cost_per_hour is not None:
            vm.cost_per_hour = instance.cost_per_hour
    return vm


def recorded_pod(record: SandboxRecord, metadata: cri.PodSandboxMetadata) -> control.Pod:
    """Return what is on record of a pod."""
    return control.Pod(
        id=record.id,
        namespace=metadata.namespace,
        name=metadata.name,
        uid=metadata.uid,
        attempt=metadata.attempt,
        state=record.state.value,
        created_at=record.created_at,
        provider=record.provider,
        handler=record.runtime_handler,
        addresses=[address for address in (record.address, *record.more_addresses.split()) if address],
    )


def past_pod(past: PastSandbox) -> control.Pod:
    """Return what is remembered of a pod that has no record any more."""
    pod = recorded_pod(past.record, past.metadata)
    pod.state = FAILED if past.failed else REMOVED
    pod.message = redacted(past.trouble)
    return pod


def shown_pod(providers: Providers, handlers: Handlers, sandbox: Sandbox) -> control.Pod:
    """Return what is known of a pod and its VM."""
    record = sandbox.record
    handler = handlers.of(record)
    pod = recorded_pod(record, sandbox.config.metadata)
    pod.message = redacted(sandbox.trouble)
    pod.containers = len(sandbox.containers)
    pod.running = sum(container.state is ContainerState.RUNNING for container in sandbox.containers.values())
    pod.labels.update(sandbox.config.labels)
    pod.agent = sandbox.watch.reach.value if sandbox.watch is not None else ""
    pod.way = way_of(sandbox)
    pod.provider = handler.node_provider.name
    asked = handler.sized(recorded_size(sandbox))
    size = size_words(_had(sandbox.machine)) or size_words(asked)
    vm = shown_vm(sandbox.instance, record, size)
    pod.size = vm.size
    if record.state in WITH_VM:
        pod.vm.CopyFrom(vm)
    for share, refused in refusals(providers, sandbox).items():
        pod.refused.add(share=share.value, total=refused.total, lately=refused.lately)
    return pod


class ControlService(ControlNodeRpcs):
    """One method per RPC.

    :param cluster_troubles: returns why objects of the cluster can't be followed; None: none are."""

    def __init__(
        self,
        inventory: Inventory,
        providers: Providers,
        handlers: Handlers,
        pools: Pools,
        reconciler: Reconciler,
        cluster_troubles: Callable[[], Sequence[str]] | None = None,
    ) -> None:
        self._inventory = inventory
        self._providers = providers
        self._handlers = handlers
        self._pools = pools
        self._reconciler = reconciler
        self._cluster_troubles = cluster_troubles

    async def ListPods(self, request: control.ListPodsRequest, call: Call) -> control.ListPodsResponse:
        tell = self._cluster_troubles
        return control.ListPodsResponse(
            provider=self._providers.own.name,
            trouble=redacted(self._providers.own.trouble),
            providers=[
                control.Provider(name=node_provider.name, trouble=redacted(node_provider.trouble))
                for node_provider in self._providers
            ],
            cluster_troubles=[] if tell is None else map(redacted, tell()),
            pods=[*self._present(), *self._past(request.past)],
        )

    def _present(self) -> Iterator[control.Pod]:
        """Yield the pods that have a record. One that is launched again says why that failed before."""
        failed = self._inventory.failed()
        for sandbox in self._inventory:
            pod = shown_pod(self._providers, self._handlers, sandbox)
            before = failed.get(sandbox.pod)
            if sandbox.state is SandboxState.LAUNCHING and before is not None and not pod.message:
                pod.message = redacted(f"an earlier launch has failed: {before.trouble}")
            yield pod

    def _past(self, every: bool) -> Iterator[control.Pod]:
        """Yield pods that have no record any more. :param every: not only those whose launch failed."""
        inventory = self._inventory
        present = {sandbox.pod for sandbox in inventory}
        failed = [past for pod, past in inventory.failed().items() if pod not in present]
        yield from map(past_pod, inventory.past if every else failed)

    async def ListOrphans(
        self, request: control.ListOrphansRequest, call: Call
    ) -> control.ListOrphansResponse:
        orphans, troubles = await self._reconciler.orphans()
        return control.ListOrphansResponse(
            vms=[_orphan(*orphan) for orphan in orphans], troubles=map(redacted, troubles)
        )

    async def EndOrphans(self, request: control.EndOrphansRequest, call: Call) -> control.EndOrphansResponse:
        found, troubles = await self._reconciler.orphans()
        orphans = {instance.id: (node_provider, instance) for node_provider, instance in found}
        unknown = [id for id in request.ids if id not in orphans]
        if unknown:
            raise NotFound(
                f"no orphan is called {', '.join(unknown[:5])[:200]}: nothing was ended; list them again"
                + "".join(f"; {trouble}" for trouble in troubles)
            )
        chosen = [orphans[id] for id in dict.fromkeys(request.ids)] or list(orphans.values())
        if request.dry_run:
            answer = control.EndOrphansResponse(ended=[_orphan(*orphan) for orphan in chosen])
        else:
            answer = await shielded(self._end(chosen))
        if not request.ids:  # those that are named have been found
            answer.troubles.extend(map(redacted, troubles))
        return answer

    async def GetPool(self, request: control.GetPoolRequest, call: Call) -> control.GetPoolResponse:
        pools = self._pools_of(request)
        troubles = {pool.trouble: None for pool in pools if pool.trouble}
        return control.GetPoolResponse(
            drained=all(pool.drained for pool in pools),
            trouble=redacted("; ".join(troubles)),
            wanted=sum(pool.target for pool in pools),
            vms=[_pooled(member) for pool in pools for member in pool.members.values()],
        )

    async def DrainPool(self, request: control.DrainPoolRequest, call: Call) -> control.DrainPoolResponse:
        pools = self._pools_of(request)
        if request.dry_run:
            members = [member for pool in pools for member in pool.members.values() if not member.taken]
            return control.DrainPoolResponse(ended=[_pooled(member) for member in members])
        for pool in pools:
            pool.context.check_ready()
        drained = await settled(shielded(pool.drain()) for pool in pools)
        response = control.DrainPoolResponse()
        for pool, ended in zip(pools, drained, strict=True):
            if isinstance(ended, Failure):
                ended.raiseException()
                continue
            left = {member.id for member in ended} & pool.members.keys()
            response.ended.extend(_pooled(member) for member in ended if member.id not in left)
            response.left.extend(_pooled(member) for member in ended if member.id in left)
        return response

    async def FillPool(self, request: control.FillPoolRequest, call: Call) -> control.FillPoolResponse:
        pools = self._pools_of(request)
        for pool in pools:
            await shielded(pool.fill())
        return control.FillPoolResponse(wanted=sum(pool.target for pool in pools))

    def _pools_of(
        self, request: control.GetPoolRequest | control.DrainPoolRequest | control.FillPoolRequest
    ) -> list[Pool]:
        """Return the pools that are meant. :raise NotFound: there is none."""
        pools = self._pools.all()
        found = [pool for pool in pools if pool.purpose.handler == request.handler]
        if request.HasField("handler") and not found:
            raise NotFound(f"handler {request.handler[:64]!r} has no pool of its own")
        return found if request.HasField("handler") else pools

    async def GetConsole(self, request: control.GetConsoleRequest, call: Call) -> control.GetConsoleResponse:
        node_providers = [
            node_provider
            for node_provider in self._providers
            if IHasConsoles.providedBy(node_provider.provider)
        ]
        if not node_providers:
            raise FailedPrecondition(
                f"the provider {', '.join(self._providers.by_name)} keeps no consoles; QEMU does"
            )
        if not request.sandbox:
            raise InvalidArgument("sandbox is empty: give its id, or the beginning of it")
        consoles = await self._consoles(node_providers, id_meant(self._inventory, request.sandbox)[:_MAX_ID])
        ids = {console.sandbox_id for console in consoles}
        if not consoles:
            raise NotFound(f"there is no console of a sandbox {request.sandbox[:_MAX_ID]!r}")
        if len(ids) > 1:
            raise InvalidArgument(
                f"several sandbox ids begin with this: {', '.join(sorted(ids)[:5])}; give more characters of "
                "one"
            )
        newest = consoles[0]
        return control.GetConsoleResponse(
            sandbox_id=newest.sandbox_id,
            vm_id=newest.instance_id,
            ended_at=int(newest.ended_at * _NANOS),
            detail=redacted(newest.detail),
            text=newest.text[-_MAX_CONSOLE:],
            output=newest.output[-_MAX_CONSOLE:],
        )

    async def _consoles(self, node_providers: Sequence[NodeProvider], sandbox: str) -> list[Console]:
        """Return the consoles that the providers have, also those of providers that can't make VMs.

        :raise InfranetesError: there is none, but a provider can't tell, or may not have all."""
        consoles: list[Console] = []
        errors: list[InfranetesError] = []
        for node_provider in node_providers:
            try:
                consoles += await cast(IHasConsoles, node_provider.provider).consoles(sandbox)
            except InfranetesError as error:
                errors.append(error)
        if not consoles and errors:
            raise errors[0]
        if not consoles:
            for node_provider in node_providers:
                node_provider.check_ready()
        return consoles

    async def _end(self, chosen: list[Orphan]) -> control.EndOrphansResponse:
        results = await settled(
            within(
                node_provider.clock,
                node_provider.times.destroy,
                node_provider.provider.destroy(instance.id),
                f"ending {instance.id}",
            )
            for node_provider, instance in chosen
        )
        response = control.EndOrphansResponse()
        for (node_provider, instance), result in zip(chosen, results, strict=True):
            if not isinstance(result, Failure):
                response.ended.append(_orphan(node_provider, instance))
                node_provider.observer.orphan_ended(node_provider.name)
                _log.warn("vm {vm}, an orphan, is ended as infranetes-ctl asked", vm=instance.id)
            else:
                response.failed.append(
                    control.Failure(vm=_orphan(node_provider, instance), error=redacted(str(result.value)))
                )
        return response


def _orphan(node_provider: NodeProvider, instance: Instance) -> control.Vm:
    return shown_vm(instance, provider=node_provider.name)


def _pooled(member: Member) -> control.Pooled:
    return control.Pooled(
        id=member.id,
        state=member.state.value,
        message=redacted(member.record.message),
        vm=shown_vm(
            member.machine.instance,
            member.record,
            size_words(_had(member.machine)) or size_words(member.size),
        ),
        handler=member.record.handler,
    )
