"""A PodProvider whose VMs are agents on loopback, for tests, benches and trying things out.

state    told by       next
(none)   boot          PENDING
PENDING  running       RUNNING     after the boot time
PENDING  ended         ENDED
RUNNING  ended         ENDED       power cut, dies-after, the farm has gone
any      end           (none)      `destroy`
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from ipaddress import IPv4Address
from typing import Any, TypeVar

import attrs
from twisted.internet.defer import Deferred, DeferredLock
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from infranetes.providers.interface import (
    Instance,
    InstanceSpec,
    InstanceState,
    IPodProvider,
    Progress,
    ProviderContext,
)
from infranetes.providers.simulated.addresses import free_address, subnet
from infranetes.providers.simulated.farm import Farm, Vm
from infranetes.providers.simulated.settings import (
    AFTER_ANNOTATION,
    BEHAVIOUR_ANNOTATION,
    BEHAVIOURS,
    FAILS,
    Fault,
    Settings,
)
from infranetes_common.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InfranetesError,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)

_T = TypeVar("_T")
_log = Logger()


@implementer(IPodProvider)
class SimulatedProvider:
    """See `IPodProvider`. What it must know of a VM is in the VM's tags, which the farm keeps."""

    name = "simulated"

    def __init__(self, reactor: Any, settings: Settings, context: ProviderContext) -> None:
        self._reactor = reactor
        self._settings = settings
        self._context = context
        self._network = settings.pod_cidr
        self._farm = Farm(
            reactor,
            settings.farm_command,
            context.state_dir / self.name,
            context.run_dir / self.name,
            self._joined,
            self._happened,
        )
        self._joins = 0
        self._vms: dict[str, Vm] = {}  # all of the farm's, other nodes' too: addresses are shared
        self._held: dict[str, str] = {}  # addresses of VMs whose boot is not answered yet, by id
        self._last_address = ""
        self._launches = 0
        self._locks: dict[str, DeferredLock] = {}
        self._destroying: set[str] = set()
        self._changes: dict[str, list[Deferred[None]]] = {}
        self._watchers: list[Callable[[Instance], None]] = []

    # ---- IPodProvider

    def start(self, progress: Progress) -> Deferred[None]:
        async def start() -> None:
            progress("finding the farm of simulated VMs")
            await self._farm.connect()

        return Deferred.fromCoroutine(start())

    def stop(self) -> Deferred[None]:
        return Deferred.fromCoroutine(self._farm.stop(end_farm=not (self._vms or self._held)))

    def configure_network(self, pod_cidr: str) -> Deferred[None]:
        async def configure() -> None:
            network = subnet(pod_cidr)
            if network == self._network:
                return
            taken = self._taken()
            in_use = sorted(taken - {each for each in taken if IPv4Address(each) in network})
            if in_use:
                raise FailedPrecondition(
                    f"pod CIDR {network} can't replace {self._network}: {len(in_use)} VMs have other "
                    f"addresses ({in_use[0]}); remove those pods first"
                )
            self._network, self._last_address = network, ""

        return Deferred.fromCoroutine(configure())

    def launch(self, spec: InstanceSpec) -> Deferred[Instance]:
        return Deferred.fromCoroutine(self._one_at_a_time(spec.token, lambda: self._launch(spec)))

    def wait_running(self, instance_id: str, timeout: float) -> Deferred[Instance]:
        def too_late(outcome: Any, _: float) -> Any:
            raise DeadlineExceeded(
                f"VM {instance_id} is not running after {timeout:g} s; it may need longer to boot"
            )

        waiting = Deferred.fromCoroutine(self._wait_running(instance_id))
        return waiting.addTimeout(timeout, self._reactor, too_late)

    def get(self, instance_id: str) -> Deferred[Instance]:
        return Deferred.fromCoroutine(self._get(instance_id))

    def list(self) -> Deferred[list[Instance]]:
        async def list_ours() -> list[Instance]:
            answer = await self._farm.request("list")
            return [_instance(vm) for vm in answer["vms"] if self._is_ours(vm)]

        return Deferred.fromCoroutine(list_ours())

    def destroy(self, instance_id: str) -> Deferred[None]:
        async def destroy() -> None:
            try:
                await self._get(instance_id)
            except NotFound:
                return
            await self._end(instance_id)

        return Deferred.fromCoroutine(destroy())

    def watch(self, ended: Callable[[Instance], None]) -> None:
        self._watchers.append(ended)

    def status(self) -> Mapping[str, str]:
        states = [vm["state"] for vm in self._vms.values() if self._is_ours(vm)]
        return {
            "farm": f"{'connected' if self._farm.connected else 'not connected'} at {self._farm.socket}",
            "pod CIDR": str(self._network),
            "requests": str(self._farm.requests),
            **{f"VMs {state.value}": str(states.count(state.value)) for state in InstanceState},
        }

    # ---- Launching

    async def _one_at_a_time(self, token: str, body: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        lock = self._locks.setdefault(token, DeferredLock())
        await lock.acquire()
        try:
            return await body()
        finally:
            lock.release()
            if not lock.locked:
                self._locks.pop(token, None)

    async def _launch(self, spec: InstanceSpec) -> Instance:
        vm_id = f"sim-{spec.token}"
        protocol = await self._farm.connect()
        self._farm.requests += 1
        if vm_id in self._vms:
            return _instance(self._vms[vm_id])
        fault = self._fault(spec)
        self._check(spec)
        # From here to the request nothing waits: an address is held for as long as the boot is open.
        self._last_address = free_address(self._network, self._taken(), self._last_address)
        self._held[vm_id] = self._last_address
        booting = protocol.request(
            "boot",
            id=vm_id,
            identity=attrs.asdict(spec.identity),
            tags={
                "cluster": spec.cluster,
                "node": spec.node,
                "token": spec.token,
                "address": self._last_address,
            },
            delay=self._settings.boot_seconds + self._settings.jitter_seconds * _fraction(spec.token),
            behaviour="normal" if fault.behaviour == FAILS else fault.behaviour,
            after=fault.after,
        ).addBoth(self._booted, vm_id)
        try:
            vm = (await self._farm.within(booting, "boot"))["vm"]
            if fault.behaviour == FAILS:
                raise Unavailable("this launch fails because the configuration has a fault for it")
        except InfranetesError:
            await self._end(vm_id)
            raise
        return _instance(vm)

    def _booted(self, answer: Any, vm_id: str) -> Any:
        self._held.pop(vm_id, None)
        if not isinstance(answer, Failure):
            self._vms.setdefault(vm_id, answer["vm"])
        return answer

    def _check(self, spec: InstanceSpec) -> None:
        settings, size = self._settings, spec.size
        for what, asked, most in (
            ("max_cpu_millis", size.cpu_millis, settings.max_cpu_millis),
            ("max_memory", size.memory_bytes, settings.max_memory),
        ):
            if not 0 <= asked <= most:
                raise InvalidArgument(f"a size of {asked} can't be had; {what} allows up to {most}")
        count = sum(self._is_ours(vm) for vm in self._vms.values()) + len(self._held)
        if settings.capacity and count >= settings.capacity:
            raise ResourceExhausted(
                f"{count} simulated VMs of a capacity of {settings.capacity}; remove pods"
            )

    def _fault(self, spec: InstanceSpec) -> Fault:
        """What goes wrong with this launch: what the pod asks for, or else the configuration."""
        asked = spec.annotations.get(BEHAVIOUR_ANNOTATION)
        if asked is not None:
            if asked not in (FAILS, *BEHAVIOURS):
                raise InvalidArgument(f"annotation {BEHAVIOUR_ANNOTATION}: {asked!r} is none of {BEHAVIOURS}")
            try:
                return Fault(1, asked, float(spec.annotations.get(AFTER_ANNOTATION, "0")))
            except ValueError:
                raise InvalidArgument(
                    f"annotation {AFTER_ANNOTATION}: seconds are wanted, 0 or more"
                ) from None
        self._launches += 1
        for fault in self._settings.faults:
            if self._launches % fault.every == 0:
                return fault
        return Fault(1, "normal")

    def _taken(self) -> set[str]:
        return {str(vm["tags"].get("address", "")) for vm in self._vms.values()} | set(self._held.values())

    # ---- Looking and ending

    async def _get(self, instance_id: str) -> Instance:
        if instance_id.startswith("sim-") and len(instance_id) == len("sim-") + 32 and instance_id.isascii():
            answer = await self._farm.request("get", id=instance_id)
            if self._is_ours(answer["vm"]):
                return _instance(answer["vm"])
        raise NotFound(f"no simulated VM of this node is called {instance_id[:64]!r}")

    async def _end(self, vm_id: str) -> None:
        self._destroying.add(vm_id)
        try:
            await self._farm.request("end", id=vm_id)
            self._vms.pop(vm_id, None)
            self._changed(vm_id)
        finally:
            self._destroying.discard(vm_id)

    async def _wait_running(self, instance_id: str) -> Instance:
        while True:
            change: Deferred[None] = Deferred()
            self._changes.setdefault(instance_id, []).append(change)
            try:
                instance = await self._get(instance_id)
                if instance.state is InstanceState.RUNNING:
                    return instance
                if instance.state is InstanceState.ENDED:
                    raise Unavailable(f"VM {instance_id} has ended: {instance.detail or 'no reason known'}")
                await change
            finally:
                waiting = self._changes.get(instance_id, [])
                if change in waiting:
                    waiting.remove(change)
                if not waiting:
                    self._changes.pop(instance_id, None)

    def _is_ours(self, vm: Vm) -> bool:
        tags = vm["tags"]
        return bool(tags.get("cluster") == self._context.cluster and tags.get("node") == self._context.node)

    # ---- What the farm tells

    def _joined(self, vms: Sequence[Vm]) -> None:
        """A connection is made: at first what is there, later also what happened meanwhile."""
        before, self._vms = self._vms, {vm["id"]: vm for vm in vms}
        self._joins += 1
        for vm_id in {*self._changes}:
            self._changed(vm_id)
        if self._joins == 1:
            return
        for vm_id, old in before.items():
            now = self._vms.get(vm_id, {**old, "state": "ended", "detail": "the farm no longer knows it"})
            if now["state"] == "ended" != old["state"]:
                self._tell(now)

    def _happened(self, event: str, vm: Vm) -> None:
        vm_id = vm["id"]
        before = self._vms.get(vm_id)
        self._vms[vm_id] = vm
        self._changed(vm_id)
        if event == "ended" and (before is None or before["state"] != "ended"):
            self._tell(vm)

    def _changed(self, vm_id: str) -> None:
        for change in self._changes.pop(vm_id, []):
            change.callback(None)

    def _tell(self, vm: Vm) -> None:
        if vm["id"] in self._destroying or not self._is_ours(vm):
            return
        instance = _instance(vm)
        for watcher in self._watchers:
            try:
                watcher(instance)
            except Exception:
                _log.failure("a watcher failed on the end of VM {vm}", vm=instance.id)


def _instance(vm: Vm) -> Instance:
    tags = vm["tags"]
    return Instance(
        id=vm["id"],
        token=tags.get("token", ""),
        sandbox_id=vm["sandbox_id"],
        state=InstanceState(vm["state"]),
        address=tags.get("address", ""),
        agent_host=vm["host"] if vm["port"] else "",
        agent_port=vm["port"],
        created_at=vm["created_at"],
        detail=vm.get("detail", ""),
    )


def _fraction(token: str) -> float:
    """0 to 1, always the same for one token."""
    return int(token[:8], 16) / 0xFFFFFFFF
