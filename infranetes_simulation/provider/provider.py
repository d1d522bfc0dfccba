# SPDX-License-Identifier: Apache-2.0
"""The PodProvider that launches, finds and destroys simulated VMs.

A VM's states:

state    cause         next
(none)   boot          PENDING
PENDING  running       RUNNING     after the boot time
PENDING  ended         ENDED
RUNNING  halted        STOPPED     `stop_vm`
STOPPED  boot          PENDING     `launch`, or ended and booted anew if starts fail
RUNNING  ended         ENDED       power cut, dies-after, the farm has gone
any      end           (none)      `destroy`
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from ipaddress import IPv4Address
from pathlib import Path

import attrs
from twisted.internet.defer import Deferred
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from infranetes.providers.annotations import refuse_unknown
from infranetes.providers.interface import (
    IHasGuestImage,
    Instance,
    InstanceSpec,
    InstanceState,
    IPodProvider,
    Progress,
    ProviderContext,
    VmRequest,
)
from infranetes.providers.keeping import IStartsKeptVms, KeptVm
from infranetes.providers.sleeping import Activity, ISleeps, Slept
from infranetes.providers.stopping import IStopsVms
from infranetes_common.concurrency import (
    KeyedLock,
    Notifier,
    deferred,
    run_in_thread,
    shielded,
    sleep,
    start,
    within,
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
from infranetes_common.reactors import IReactor
from infranetes_simulation.protocol import (
    ARCHIVES,
    ASLEEP,
    BEHAVIOURS,
    DIES_AFTER,
    ENDED,
    IMAGES_TAG,
    LAYERS,
    NORMAL,
    RUNNING,
    STOPPED,
    Answer,
    Hardware,
    Vm,
)
from infranetes_simulation.provider import kept
from infranetes_simulation.provider.addresses import free_address, subnet
from infranetes_simulation.provider.farm_client import FarmClient
from infranetes_simulation.provider.settings import (
    AFTER_ANNOTATION,
    ANNOTATIONS,
    BEHAVIOUR_ANNOTATION,
    FAILS,
    IMAGES_ANNOTATION,
    NAMESPACES,
    SHARED,
    Fault,
    Settings,
)
from infranetes_simulation.provider.sleeping import SleepFiles

_log = Logger()


@implementer(IPodProvider, IHasGuestImage, ISleeps, IStartsKeptVms, IStopsVms)
class SimulatedProvider:
    """See `IPodProvider`. Whatever has to be remembered of a VM is in its tags, which the farm keeps."""

    name = "simulated"

    def __init__(self, reactor: IReactor, settings: Settings, context: ProviderContext) -> None:
        self._reactor = reactor
        self._settings = settings
        self._context = context
        self._network = settings.pod_cidr
        self._farm = FarmClient(
            reactor,
            settings.farm_command,
            context.state_dir / self.name,
            context.run_dir / self.name,
            self._connected,
            self._event,
        )
        self._slept = SleepFiles(context.state_dir / self.name / "asleep")
        self._connections = 0
        self._vms: dict[str, Vm] = {}  # all of the farm's, other nodes' too: addresses are shared
        self._reserved: dict[str, str] = {}  # addresses of VMs whose boot is not answered yet, by VM id
        self._last_address = ""
        self._launches = 0
        self._locks: KeyedLock[str] = KeyedLock()  # by token
        self._vms_kept: KeyedLock[str] = KeyedLock()  # by VM id
        self._destroying: set[str] = set()
        self._changes: dict[str, Notifier] = {}  # by VM id
        self._watchers: list[Callable[[Instance], None]] = []

    # ---- IPodProvider

    @deferred
    async def start(self, progress: Progress) -> None:
        progress("finding the farm of simulated VMs")
        await self._farm.connect()

    @deferred
    async def stop(self) -> None:
        await self._farm.stop(end_farm=not (self._vms or self._reserved))

    @deferred
    async def configure_network(self, pod_cidr: str) -> None:
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

    @deferred
    async def launch(self, spec: InstanceSpec) -> Instance:
        async with self._locks.held(spec.token):
            return await self._launch(spec)

    def wait_running(self, instance_id: str, timeout: float) -> Deferred[Instance]:
        def too_late(outcome: object, _: float) -> Instance:
            raise DeadlineExceeded(
                f"VM {instance_id} is not running after {timeout:g} s; it may need longer to boot"
            )

        return start(self._wait_running(instance_id)).addTimeout(timeout, self._reactor, too_late)

    @deferred
    async def get(self, instance_id: str) -> Instance:
        if instance_id.startswith("sim-") and len(instance_id) == len("sim-") + 32 and instance_id.isascii():
            answer = await self._farm.request("get", id=instance_id)
            if self._is_ours(answer["vm"]):
                return _instance(answer["vm"])
        raise NotFound(f"no simulated VM of this node is called {instance_id[:64]!r}")

    @deferred
    async def list(self) -> list[Instance]:
        answer = await self._farm.request("list")
        return [_instance(vm) for vm in answer["vms"] if self._is_ours(vm)]

    @deferred
    async def destroy(self, instance_id: str) -> None:
        try:
            await self.get(instance_id)
        except NotFound:
            return
        await self._end(instance_id)

    def watch(self, ended: Callable[[Instance], None]) -> None:
        self._watchers.append(ended)

    def container_providers(self) -> Sequence[str]:
        return ("oci",) if self._settings.machines == NAMESPACES else ("fake",)

    def status(self) -> Mapping[str, str]:
        states = [vm["state"] for vm in self._vms.values() if self._is_ours(vm)]
        return {
            "farm": f"{'connected' if self._farm.connected else 'not connected'} at {self._farm.socket}",
            "pod CIDR": str(self._network),
            "requests": str(self._farm.requests),
            **{f"VMs {state.value}": str(states.count(state.value)) for state in InstanceState},
        }

    # ---- IStopsVms

    def check_stoppable(self, request: VmRequest) -> None:
        refuse_unknown("simulated", request.annotations, ANNOTATIONS)

    @deferred
    async def stop_vm(self, instance_id: str, seconds: float) -> Instance:
        instance = await self.get(instance_id)
        stopping = self._stop_vm(instance_id, instance.token)
        return await within(self._reactor, seconds, stopping, f"stopping VM {instance_id}")

    async def _stop_vm(self, instance_id: str, token: str) -> Instance:
        instance = await self.get(instance_id)
        if instance.state is InstanceState.RUNNING:
            await sleep(self._reactor, self._settings.stop_seconds)
        async with self._locks.held(token):
            instance = await self.get(instance_id)
            if instance.state is InstanceState.ENDED:
                raise Unavailable(f"VM {instance_id} has ended: {instance.detail or 'no reason known'}")
            vm = (await self._farm.request("halt", id=instance_id))["vm"]
            self._vms[instance_id] = vm
            self._changed(instance_id)
            return _instance(vm)

    # ---- IStartsKeptVms

    @deferred
    async def keep(self, instance_id: str, directory: Path, seconds: float) -> KeptVm:
        await self.get(instance_id)
        keeping = self._keep(instance_id, directory)
        return await within(self._reactor, seconds, keeping, f"keeping VM {instance_id}")

    async def _keep(self, instance_id: str, directory: Path) -> KeptVm:
        async with self._vms_kept.held(instance_id):
            instance = await self.get(instance_id)
            if instance.state is not InstanceState.RUNNING:
                raise Unavailable(f"VM {instance_id} is {instance.state.value} and can't be kept")
            return await kept.keep(self._reactor, instance.sandbox_id, directory)

    @deferred
    async def prepare(self, directory: Path, seconds: float) -> None:
        await run_in_thread(self._reactor, kept.thd_prepare, directory)

    @deferred
    async def check(self, directory: Path) -> None:
        await run_in_thread(self._reactor, kept.thd_check, directory)

    # ---- ISleeps

    @deferred
    async def sleep(self, instance_id: str) -> Slept:
        await self.get(instance_id)
        return await shielded(self._sleep(instance_id))

    async def _sleep(self, instance_id: str) -> Slept:
        began = self._reactor.seconds()
        async with self._vms_kept.held(instance_id):
            instance = await self.get(instance_id)
            if instance.state is not InstanceState.RUNNING:
                raise Unavailable(f"VM {instance_id} is {instance.state.value} and can't sleep")
            size = await run_in_thread(self._reactor, self._slept.write, instance_id)
            if not instance.asleep:
                await self._behave(instance_id, ASLEEP)
        return Slept(size, self._reactor.seconds() - began)

    @deferred
    async def wake(self, instance_id: str) -> None:
        await self.get(instance_id)
        await shielded(self._wake(instance_id))

    async def _wake(self, instance_id: str) -> None:
        async with self._vms_kept.held(instance_id):
            instance = await self.get(instance_id)
            if instance.state is not InstanceState.RUNNING:
                raise Unavailable(f"VM {instance_id} is {instance.state.value}: {instance.detail}")
            if not instance.asleep:
                return
            why = await run_in_thread(self._reactor, self._slept.why_unusable, instance_id)
            await run_in_thread(self._reactor, self._slept.remove, instance_id)
            if why:
                await self._behave(instance_id, DIES_AFTER, f"it could not be woken: {why}")
                while (instance := await self.get(instance_id)).state is not InstanceState.ENDED:
                    await sleep(self._reactor, 0.02)
                raise Unavailable(f"VM {instance_id} has ended: {instance.detail}")
            await self._behave(instance_id, NORMAL)

    async def _behave(self, instance_id: str, behaviour: str, detail: str = "") -> None:
        answer = await self._farm.request(
            "behave", id=instance_id, behaviour=behaviour, after=0, detail=detail
        )
        if instance_id in self._vms:
            self._vms[instance_id] = answer["vm"]

    @deferred
    async def activity(self, instance_id: str) -> Activity:
        instance = await self.get(instance_id)
        if instance.asleep or instance.state is not InstanceState.RUNNING:
            raise Unavailable(f"VM {instance_id} does not execute")
        return Activity(0, 0)

    def when_called(self, called: Callable[[str], None]) -> None:
        """Nobody sends packets to simulated VMs."""

    def slept_bytes(self) -> int:
        return self._slept.size()

    # ---- Launching

    async def _launch(self, spec: InstanceSpec) -> Instance:
        vm_id = f"sim-{spec.token}"
        if spec.kept is not None and vm_id not in self._vms:
            await run_in_thread(self._reactor, kept.thd_check, spec.kept)
        connection = await self._farm.connect()
        self._farm.requests += 1
        if vm_id in self._vms and self._vms[vm_id]["state"] == STOPPED:
            if await self._can_start(vm_id):
                return await self._start_again(spec, vm_id)
            connection = await self._farm.connect()
        if vm_id in self._vms:
            return _instance(self._vms[vm_id])
        self._check(spec)
        fault = self._fault(spec)
        # Nothing is awaited from here to the request. The address is reserved until that is answered.
        self._last_address = free_address(self._network, self._taken(), self._last_address)
        self._reserved[vm_id] = self._last_address
        booting = connection.request(
            "boot",
            id=vm_id,
            identity=attrs.asdict(spec.identity),
            tags={
                "cluster": spec.cluster,
                "node": spec.node,
                "token": spec.token,
                "address": self._last_address,
                IMAGES_TAG: spec.request.annotations.get(IMAGES_ANNOTATION, self._settings.images),
            },
            hardware=self._hardware(self._last_address),
            delay=self._settings.boot_seconds + self._settings.jitter_seconds * _fraction(spec.token),
            behaviour=NORMAL if fault.behaviour == FAILS else fault.behaviour,
            after=fault.after,
        ).addBoth(self._booted, vm_id)
        try:
            vm = (await self._farm.in_time(booting, "boot"))["vm"]
            if fault.behaviour == FAILS:
                asked = BEHAVIOUR_ANNOTATION in spec.request.annotations
                why = (
                    f"pod's annotation {BEHAVIOUR_ANNOTATION} asks" if asked else "configuration has a fault"
                )
                raise Unavailable(f"this launch fails because the {why} for it")
        except InfranetesError:
            await self._end(vm_id)
            raise
        return _instance(vm)

    async def _can_start(self, vm_id: str) -> bool:
        """Return whether a stopped VM can be started. If not, it is ended."""
        try:
            await self._farm.request("get", id=vm_id)
        except NotFound:
            self._vms.pop(vm_id, None)
            return False
        if self._settings.starts_fail:
            await self._end(vm_id)
        return not self._settings.starts_fail

    async def _start_again(self, spec: InstanceSpec, vm_id: str) -> Instance:
        """Start a stopped VM. A later daemon's call finds it booting."""
        answer = await self._farm.request(
            "boot",
            id=vm_id,
            identity=attrs.asdict(spec.identity),
            delay=self._settings.start_seconds,
            behaviour=NORMAL,
        )
        self._vms[vm_id] = answer["vm"]
        self._changed(vm_id)
        return _instance(answer["vm"])

    def _hardware(self, address: str) -> Hardware | None:
        if self._settings.machines == SHARED:
            return None
        length = self._network.prefixlen
        return {
            "address": f"{address}/{length}",
            "gateway": f"{self._network.network_address + 1}/{length}",
            "cgroup": self._settings.cgroup,
            "keep_layers": self._settings.keep_layers,
        }

    def _booted(self, answer: Answer | Failure, vm_id: str) -> Answer | Failure:
        self._reserved.pop(vm_id, None)
        if not isinstance(answer, Failure):
            self._vms.setdefault(vm_id, answer["vm"])
        return answer

    def _check(self, spec: InstanceSpec) -> None:
        settings, size = self._settings, spec.request.size
        for what, asked, most in (
            ("max_cpu_millis", size.cpu_millis, settings.max_cpu_millis),
            ("max_memory", size.all_bytes, settings.max_memory),
        ):
            if not 0 <= asked <= most:
                raise InvalidArgument(f"a size of {asked} can't be had; {what} allows up to {most}")
        refuse_unknown("simulated", spec.request.annotations, ANNOTATIONS)
        images = spec.request.annotations.get(IMAGES_ANNOTATION, ARCHIVES)
        if images not in (ARCHIVES, LAYERS):
            raise InvalidArgument(
                f"annotation {IMAGES_ANNOTATION}: {images!r} is neither {ARCHIVES} nor {LAYERS}"
            )
        count = sum(self._is_ours(vm) for vm in self._vms.values()) + len(self._reserved)
        if settings.capacity and count >= settings.capacity:
            raise ResourceExhausted(
                f"{count} simulated VMs of a capacity of {settings.capacity}; remove pods"
            )

    def _fault(self, spec: InstanceSpec) -> Fault:
        """Return what goes wrong with this launch, by the pod's annotations or else the configuration."""
        behaviour = spec.request.annotations.get(BEHAVIOUR_ANNOTATION)
        if behaviour is not None:
            if behaviour not in (FAILS, *BEHAVIOURS):
                raise InvalidArgument(
                    f"annotation {BEHAVIOUR_ANNOTATION}: {behaviour!r} is none of {BEHAVIOURS}"
                )
            try:
                return Fault(1, behaviour, float(spec.request.annotations.get(AFTER_ANNOTATION, "0")))
            except ValueError:
                raise InvalidArgument(
                    f"annotation {AFTER_ANNOTATION}: seconds are wanted, 0 or more"
                ) from None
        self._launches += 1
        for fault in self._settings.faults:
            if self._launches % fault.every == 0:
                return fault
        return Fault(1, NORMAL)

    def _taken(self) -> set[str]:
        return {str(vm["tags"].get("address", "")) for vm in self._vms.values()} | set(
            self._reserved.values()
        )

    # ---- Waiting and ending

    async def _end(self, vm_id: str) -> None:
        self._destroying.add(vm_id)
        try:
            await run_in_thread(self._reactor, self._slept.remove, vm_id)
            await self._farm.request("end", id=vm_id)
            self._vms.pop(vm_id, None)
            self._changed(vm_id)
        finally:
            self._destroying.discard(vm_id)

    async def _wait_running(self, instance_id: str) -> Instance:
        while True:
            changes = self._changes.setdefault(instance_id, Notifier())
            change = changes.wait()  # before the VM is looked at, so that none is missed
            try:
                instance = await self.get(instance_id)
                if instance.state is InstanceState.RUNNING:
                    return instance
                if instance.state is InstanceState.ENDED:
                    raise Unavailable(f"VM {instance_id} has ended: {instance.detail or 'no reason known'}")
                await change
            finally:
                change.addErrback(lambda _: None).cancel()
                if not changes.waiters and self._changes.get(instance_id) is changes:
                    del self._changes[instance_id]

    def _is_ours(self, vm: Vm) -> bool:
        tags = vm["tags"]
        return bool(tags.get("cluster") == self._context.cluster and tags.get("node") == self._context.node)

    # ---- What the farm reports

    def _connected(self, vms: Sequence[Vm]) -> None:
        """Take in all VMs after connecting; after a reconnection also report those that have ended since."""
        before, self._vms = self._vms, {vm["id"]: vm for vm in vms}
        self._connections += 1
        for vm_id in {*self._changes}:
            self._changed(vm_id)
        if self._connections == 1:
            return
        for vm_id, old in before.items():
            gone: Vm = {**old, "state": ENDED, "detail": "the farm no longer knows it"}
            now = self._vms.get(vm_id, gone)
            if now["state"] == ENDED != old["state"]:
                self._report_end(now)

    def _event(self, event: str, vm: Vm) -> None:
        vm_id = vm["id"]
        before = self._vms.get(vm_id)
        self._vms[vm_id] = vm
        self._changed(vm_id)
        if event == ENDED and (before is None or before["state"] != ENDED):
            self._report_end(vm)

    def _changed(self, vm_id: str) -> None:
        changes = self._changes.pop(vm_id, None)
        if changes is not None:
            changes.notify()

    def _report_end(self, vm: Vm) -> None:
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
        asleep=vm["behaviour"] == ASLEEP and vm["state"] == RUNNING,
    )


def _fraction(token: str) -> float:
    """Return a number from 0 to 1, always the same one for a token."""
    return int(token[:8], 16) / 0xFFFFFFFF
