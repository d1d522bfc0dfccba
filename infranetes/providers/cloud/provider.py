# SPDX-License-Identifier: Apache-2.0
"""The PodProvider over any cloud: launching, waiting and destroying, so that nothing is left behind.

How a VM's state at the cloud becomes its InstanceState:

cloud          InstanceState   next
launched       PENDING         RUNNING, ENDED
executing      RUNNING         ENDED       watchers are told unless `destroy` was called
stopped by us  STOPPED         PENDING     `launch` with its token: see `vms.stopping`
stopped, gone  ENDED           (none)      `destroy`

What becomes of a VM that is destroyed:

state      left when                                          next
asked      the cloud has taken its end: `destroy` fires       ending
ending     a list lacks it, or shows that it is gone          (none)
ending     lists show it for longer than they may be stale    asked, unasked for by a caller

A launch goes on when its caller goes away; the next call for its token waits for it and returns its VM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from ipaddress import IPv4Network
from typing import Generic, NoReturn, TypeVar

from twisted.internet.defer import Deferred
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import alsoProvides, implementer

from infranetes.providers.address_ranges import AddressRange, AddressRanges
from infranetes.providers.annotations import PREFIX, Wishes, read, refuse_unknown
from infranetes.providers.cloud.calls.calls import Calls
from infranetes.providers.cloud.calls.tasks import Tasks
from infranetes.providers.cloud.calls.translate import to_infranetes_error
from infranetes.providers.cloud.guests.guests import CloudGuests, Surroundings
from infranetes.providers.cloud.interface import (
    Action,
    Cloud,
    CloudError,
    CloudVM,
    D,
    ErrorKind,
    GuestCloud,
    StoppingCloud,
    TellsRanges,
)
from infranetes.providers.cloud.offers.book import OfferBook
from infranetes.providers.cloud.offers.own_prices import OwnPrices
from infranetes.providers.cloud.offers.refresh import OfferRefresh
from infranetes.providers.cloud.offers.size_choices import explain
from infranetes.providers.cloud.settings import CloudSettings
from infranetes.providers.cloud.vms.boots import Boots
from infranetes.providers.cloud.vms.catalogue import MachineImageCatalogue
from infranetes.providers.cloud.vms.launch import Launcher
from infranetes.providers.cloud.vms.ledger import Ledger
from infranetes.providers.cloud.vms.stopping import StoppedFiles, Stopper
from infranetes.providers.cloud.vms.sweep import Sweeper
from infranetes.providers.cloud.vms.tombstones import Tombstones
from infranetes.providers.cloud.vms.watch import Watcher
from infranetes.providers.cloud.volumes.disk_calls import DiskCalls
from infranetes.providers.cloud.volumes.disk_snapshots import DiskSnapshots
from infranetes.providers.cloud.volumes.disks import CloudDisks
from infranetes.providers.cloud.volumes.snapshots import give_snapshots
from infranetes.providers.cloud.volumes.volumes import CloudVolumes, Vms
from infranetes.providers.hypervisor import IBootsGuests, IHypervisor
from infranetes.providers.interface import (
    IHasCatalogue,
    IInVpc,
    IListsRarely,
    Instance,
    InstanceSpec,
    InstanceState,
    IPodProvider,
    Progress,
    ProviderContext,
    Size,
    VmRequest,
)
from infranetes.providers.keeping import refuse_kept
from infranetes.providers.size_choices import IChoosesSizes, SizeChoice
from infranetes.providers.stopping import IStopsVms
from infranetes.providers.tenant_volumes import TenantVolumes
from infranetes.providers.tenants import node_provider_name
from infranetes.providers.volumes import IHasVolumes
from infranetes_common.concurrency import Coro, KeyedLock, deferred, run_in_thread, sleep
from infranetes_common.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    Unavailable,
)
from infranetes_common.reactors import IReactor

T = TypeVar("T")

_HOURS_A_MONTH = 730.0

_log = Logger()


@implementer(IPodProvider, IHasCatalogue, IInVpc, IChoosesSizes, IListsRarely)
class CloudProvider(Generic[D]):
    """See `IPodProvider`.

    :param disks: for volumes; None: the cloud has none here. :param snapshots: of these volumes.
    :param book: the cloud's sizes and prices; None: the cloud itself knows its sizes, without prices.
    :param own: the administrator's own prices."""

    def __init__(
        self,
        reactor: IReactor,
        cloud: Cloud[D],
        settings: CloudSettings,
        context: ProviderContext,
        disks: CloudDisks[D] | None = None,
        snapshots: DiskSnapshots[D] | None = None,
        book: OfferBook[D] | None = None,
        own: OwnPrices | None = None,
    ) -> None:
        self.name = node_provider_name(cloud.name, context.tenant)
        self._reactor = reactor
        self._cloud = cloud
        self._settings = settings
        self._ranges = context.ranges
        self._started = False
        self._unwanted: set[str] = set()  # ids of VMs that are being destroyed without a caller's request
        self._tasks = Tasks()
        self._locks: KeyedLock[str] = KeyedLock()  # by token
        self._calls = Calls(reactor, cloud, settings, context.observer, self.name)
        self.catalogue = MachineImageCatalogue(cloud, self._call_for_catalogue)
        self._ledger = Ledger(reactor.seconds, settings.settle_seconds)
        self._tombstones = Tombstones(context.state_dir / cloud.name / "destroyed")
        self._watcher = Watcher(
            reactor,
            cloud,
            settings,
            self._calls,
            self._ledger,
            self._to_instance,
            self._destroy_unwanted,
            self._takes_end,
            self._is_agentless,
        )
        self._boots = Boots(cloud, settings, self._calls, self._ledger, self._watcher.waiting, self._get)
        self._launcher = Launcher(
            reactor,
            cloud,
            settings,
            context,
            self._calls,
            self._ledger,
            self._watcher.waiting,
            self._watcher.launching,
            self._watcher.unwanted,
            self._destroy,
        )
        self._book = book
        self._own = own
        self._refresh = (
            OfferRefresh(reactor, book, self._calls, settings.retry_seconds) if book is not None else None
        )
        self._sweeper = Sweeper(reactor, cloud, settings, self._calls, self._ledger, self._locks.busy)
        self._stopper: Stopper[D] | None = None
        if isinstance(cloud, StoppingCloud):
            files = StoppedFiles(context.state_dir / cloud.name / "stopped")
            self._stopper = Stopper(
                reactor, cloud, settings, self._calls, self._ledger, self._locks, files,
                self._watcher.waiting, self._destroy, self._get,
            )  # fmt: skip
            alsoProvides(self, IStopsVms)
        self._guests: CloudGuests[D] | None = None
        if isinstance(cloud, GuestCloud):
            around = Surroundings(
                reactor, cloud, settings, self._calls, self._ledger, self._watcher.waiting, self._get,
                self._destroy_by_id, self._task, self._watcher.refusals_noted,
                lambda: self._watcher.stretch.factor,
            )  # fmt: skip
            self._guests = CloudGuests(around, context.state_dir / cloud.name / "guests")
            self.user_data_bytes = cloud.user_data_bytes
            alsoProvides(self, IBootsGuests)
        if disks is not None:
            calls = DiskCalls(reactor, cloud.location, disks, settings, self._calls)
            vms = Vms(self._check_started, self._ledger.last_said, self._get)
            made = CloudVolumes(
                reactor, disks, calls, self._tasks, vms, settings.settle_seconds, context.cluster
            )
            if snapshots is not None:
                give_snapshots(made, snapshots, calls, context.cluster)
            its = TenantVolumes(context.tenant, made) if context.tenant else None
            self.volumes: CloudVolumes[D] | TenantVolumes = its or made
            alsoProvides(self, IHasVolumes)

    # ---- IPodProvider

    def start(self, progress: Progress) -> Deferred[None]:
        return self._task(self._start(progress))

    @deferred
    async def stop(self) -> None:
        self._watcher.stop()
        self._sweeper.stop()
        if self._refresh is not None:
            self._refresh.stop()
        if self._guests is not None:
            self._guests.stop()
        self._tasks.stop()
        await self._calls.stop()

    def configure_network(self, pod_cidr: str) -> Deferred[None]:
        """Check the subnet only: the cloud's own network gives pods their addresses."""

        async def configure() -> None:
            try:
                IPv4Network(pod_cidr)
            except ValueError as error:
                raise InvalidArgument(f"pod CIDR {pod_cidr!r} is not an IPv4 subnet: {error}") from None

        return self._task(configure())

    def launch(self, spec: InstanceSpec) -> Deferred[Instance]:
        async def launch() -> Instance:
            self._check_started()
            refuse_kept(self.name, spec)
            async with self._locks.held(spec.token):
                if spec.request.guest is not None:
                    return self._to_instance(await self._launch_guest(spec))
                started = await self._start_stopped(spec)
                return self._to_instance(started or await self._launcher.launch(spec))

        return self._task(launch(), spec.token)

    def wait_running(self, instance_id: str, timeout: float) -> Deferred[Instance]:
        def too_late(outcome: object, seconds: float) -> NoReturn:
            raise DeadlineExceeded(
                f"VM {instance_id} is not running after {timeout:g} s; it may need longer to boot, or its "
                "console says why it fails to"
            )

        async def wait() -> Instance:
            self._check_started()
            return self._to_instance(await self._boots.wait_running(instance_id))

        return self._task(wait()).addTimeout(timeout, self._reactor, too_late)

    def get(self, instance_id: str) -> Deferred[Instance]:
        async def get() -> Instance:
            self._check_started()
            return self._to_instance(await self._get(instance_id))

        return self._task(get())

    def list(self) -> Deferred[list[Instance]]:
        async def list_instances() -> list[Instance]:
            self._check_started()
            for token in list(self._tasks.abandoned):
                async with self._locks.held(token):
                    pass
            vms, listed = await self._watcher.list_all()
            self._task(self._watcher.settle(listed)).addErrback(self._log_unsettled)
            hidden = {vm.id for vm in self._ledger.duplicates()} | self._unwanted
            return [self._to_instance(vm) for vm in vms if vm.id not in hidden]

        return self._task(list_instances())

    def destroy(self, instance_id: str) -> Deferred[None]:
        async def destroy() -> None:
            self._check_started()
            await self._destroy_by_id(instance_id)
            if self._guests is not None:
                await self._guests.destroyed(instance_id)

        return self._task(destroy())

    def hypervisor(self, instance_id: str) -> IHypervisor:
        """See `IBootsGuests`."""
        if self._guests is None:
            raise NotFound(f"VM {instance_id[:64]!r} has our agent")
        return self._guests.hypervisor(instance_id)

    def check_stoppable(self, request: VmRequest) -> None:
        """See `IStopsVms`."""
        refuse_unknown(self._cloud.name, request.annotations)
        wishes = read(request.annotations)
        if wishes.spot:
            raise InvalidArgument(
                f"annotation {PREFIX}spot: spot VMs can't wait stopped, as the cloud may take them; leave "
                "`stopped` out, or the annotation"
            )
        if isinstance(self._cloud, StoppingCloud):
            self._cloud.check_stoppable(wishes)

    def stop_vm(self, instance_id: str, seconds: float) -> Deferred[Instance]:
        """See `IStopsVms`."""

        def too_late(outcome: object, _: float) -> NoReturn:
            raise DeadlineExceeded(f"VM {instance_id} is not stopped after {seconds:g} s")

        async def stop() -> Instance:
            self._check_started()
            if self._stopper is None:
                raise InvalidArgument(f"VMs of {self.name} can't be stopped and started again")
            return self._to_instance(await self._stopper.stop(await self._get(instance_id)))

        return self._task(stop()).addTimeout(seconds, self._reactor, too_late)

    def watch(self, ended: Callable[[Instance], None]) -> None:
        self._watcher.watchers.append(ended)

    def list_seconds(self) -> float:
        """See `IListsRarely`."""
        return self._watcher.stretch.at_rest(self._settings.watch_seconds)

    def agent_heard(self, instance_id: str, heard: bool) -> None:
        """See `IListsRarely`."""
        self._watcher.hear(instance_id, heard)

    def status(self) -> Mapping[str, str]:
        states = [entry.vm.state for entry in self._ledger.entries.values()]
        calls = self._calls
        slowed = "".join(f", {rate:.1f} {action.value} a second" for action, rate in calls.slowed().items())
        factor = self._watcher.stretch.factor
        rarer = f", looks {factor:.1f} times rarer" if factor > 1.0 else ""
        return {
            "cloud": f"{self._cloud.location}, {calls.state}",
            "calls": f"{calls.made} made, {calls.failed} failed{slowed}{rarer}",
            **{f"VMs {state.value}": str(states.count(state)) for state in InstanceState},
        }

    def choose_size(self, size: Size, gpus: int, limit: int) -> SizeChoice:
        self._check_started()
        need = self._launcher.need(size, Wishes(gpus=gpus))
        return explain(self._cloud.offers, need, size, self._settings, self._book, limit)

    # ---- Bodies

    def _task(self, work: Coro[T], key: str = "") -> Deferred[T]:
        """Run `work` as a task; clouds' errors become Infranetes' errors."""

        async def translated() -> T:
            try:
                return await work
            except CloudError as error:
                raise to_infranetes_error(self._cloud.location, error) from error

        return self._tasks.start(translated(), key)

    def _call_for_catalogue(self, what: str, work: Callable[[D], T]) -> Deferred[T]:
        async def call() -> T:
            self._check_started()
            return await self._calls.call(what, work)

        return self._task(call())

    def _log_unsettled(self, failure: Failure) -> None:
        _log.debug("{cloud}: {error}", cloud=self._cloud.location, error=failure.value)

    def _check_started(self) -> None:
        if not self._started:
            raise Unavailable(f"provider {self.name} has not started")

    async def _start(self, progress: Progress) -> None:
        progress(f"asking {self._cloud.location} for what the configuration names")
        if not self._started:
            await self._calls.start()
        destroyed = await run_in_thread(self._reactor, self._tombstones._thd_load)
        self._ledger.record_destroyed_before(destroyed)
        try:
            architecture = await self._calls.call("check the configuration", self._cloud._thd_check)
        except CloudError as error:
            if error.kind in (ErrorKind.INVALID, ErrorKind.NOT_FOUND):
                raise FailedPrecondition(f"{self._cloud.location}: {error}; see the configuration") from error
            raise
        self._launcher.architecture = architecture
        if self._refresh is not None and not self._started:
            progress(f"asking {self._cloud.location} for its sizes and their prices")
            await self._refresh.begin()
        if self._ranges is not None and isinstance(self._cloud, TellsRanges):
            await self._claim(self._ranges, self._cloud)
        if self._guests is not None:
            await self._guests.load()
        if self._stopper is not None:
            await self._stopper.load()
        _, listed = await self._watcher.list_all()
        await run_in_thread(self._reactor, self._tombstones._thd_prune, listed)
        if not self._started:
            self._started = True
            loops = [self._watcher.run(), self._sweeper.run()]
            if self._refresh is not None:
                loops.append(self._refresh.run())
            if self._own is not None:
                loops.append(self._own.follow(self._reactor))
            for loop in loops:
                self._tasks.start(loop).addErrback(lambda failure: failure.trap(Unavailable))

    async def _claim(self, ranges: AddressRanges, cloud: TellsRanges[D]) -> None:
        """Claim the addresses that pods have. :raise FailedPrecondition: they are another tenant's."""
        its: Sequence[AddressRange] = ()
        if not self._settings.pods_are_public:
            its = await self._calls.call("look at the networks' addresses", cloud._thd_ranges)
        await run_in_thread(self._reactor, ranges._thd_claim, self.name, its)

    async def _get(self, instance_id: str) -> CloudVM:
        if self._cloud.is_id(instance_id) and instance_id not in self._ledger.destroyed:
            vm = await self._calls.call(
                f"look at VM {instance_id}", partial(self._cloud._thd_get, id=instance_id)
            )
            if instance_id not in self._ledger.destroyed:
                if vm is not None:
                    vm = self._ledger.record(vm)
                    self._watcher.publish_changes()
                    return vm
                entry = self._ledger.entries.get(instance_id)
                if entry is not None and self._ledger.is_new(entry):
                    return entry.vm
        raise NotFound(f"no VM of this node is called {instance_id[:64]!r} at {self._cloud.location}")

    async def _start_stopped(self, spec: InstanceSpec) -> CloudVM | None:
        """Start the VM of the spec's token, if it waits stopped."""
        if self._stopper is None or spec.token not in self._ledger.stopped:
            return None
        self._watcher.unwanted.pop(spec.token, None)
        return await self._stopper.start(spec.token, self._launcher.identity(spec))

    # ---- Guests without our agent

    async def _launch_guest(self, spec: InstanceSpec) -> CloudVM:
        if self._guests is None:
            raise InvalidArgument(f"VMs of {self.name} need our agent in their image")
        await self._guests.begin(spec.token)
        try:
            vm = await self._launcher.launch(spec)
            await self._guests.launched(vm)
        except Exception:
            await self._guests.failed(spec.token)
            raise
        return vm

    def _takes_end(self, vm: CloudVM) -> bool:
        return self._guests is not None and self._guests.takes_end(vm)

    def _is_agentless(self, vm: CloudVM) -> bool:
        return self._guests is not None and vm.token in self._guests

    # ---- Destroying

    async def _destroy_by_id(self, instance_id: str) -> None:
        try:
            vm = self._ledger.last_said(instance_id) or await self._get(instance_id)
        except NotFound:
            return
        async with self._locks.held(vm.token):
            await self._destroy(vm)

    async def _destroy(self, vm: CloudVM) -> None:
        """Destroy a VM, release what it held, and leave a tombstone. The cloud's list confirms the end."""
        if vm.id in self._ledger.destroyed:
            return
        self._watcher.destroying.add(vm.id)
        try:
            deadline = self._reactor.seconds() + self._settings.destroy_seconds
            what = f"destroy VM {vm.id}"
            while not await self._is_destroyed(vm, what):
                if self._reactor.seconds() > deadline:
                    raise CloudError(
                        ErrorKind.TRANSIENT, f"{what}: the cloud has not accepted the deletion yet"
                    )
                await sleep(self._reactor, self._settings.poll_seconds)
            await run_in_thread(self._reactor, self._tombstones._thd_add, vm.id, vm.token)
            self._ledger.record_destroyed(vm.id, vm.token)
            if self._stopper is not None:
                await self._stopper.forget(vm.token)
            self._watcher.publish_changes()
        finally:
            self._watcher.destroying.discard(vm.id)

    async def _is_destroyed(self, vm: CloudVM, what: str) -> bool:
        """Ask the cloud to destroy a VM. Returns whether it has accepted the request."""
        try:
            return await self._calls.call(
                what, partial(self._cloud._thd_destroy, vm=vm), action=Action.DESTROY
            )
        except CloudError as error:
            if error.kind is not ErrorKind.NOT_FOUND:
                raise
            entry = self._ledger.entries.get(vm.id)
            if entry is not None and self._ledger.is_new(entry):
                return False  # a part of the cloud may not know the VM yet
        await self._calls.call(what, partial(self._cloud._thd_release_resources, vm=vm), action=Action.CHANGE)
        return True

    def _destroy_unwanted(self, vm: CloudVM, why: str) -> None:
        """Destroy a VM that no caller knows, in the background."""
        if vm.id in self._unwanted:
            return
        self._unwanted.add(vm.id)
        _log.warn("{cloud}: destroying VM {vm}: {why}", cloud=self._cloud.location, vm=vm.id, why=why)

        async def destroy() -> None:
            async with self._locks.held(vm.token):
                await self._destroy(vm)

        def done(outcome: Failure | None) -> None:
            self._unwanted.discard(vm.id)
            if isinstance(outcome, Failure):
                _log.warn(
                    "{cloud}: VM {vm} is not destroyed yet: {error}",
                    cloud=self._cloud.location,
                    vm=vm.id,
                    error=outcome.value,
                )

        self._task(destroy()).addBoth(done)

    def _dollars_of(self, vm: CloudVM) -> float | None:
        if vm.state is not InstanceState.STOPPED:
            return self._dollars(vm.size)
        return self._settings.stopped_price / _HOURS_A_MONTH or None

    def _dollars(self, size: str) -> float | None:
        if self._book is not None:
            return self._book.dollars(size)
        return next((offer.price for offer in self._cloud.offers if offer.name == size), None)

    def _to_instance(self, vm: CloudVM) -> Instance:
        public = self._settings.agent_address == "public"
        host = vm.public_address if public else vm.private_address
        if vm.state is InstanceState.STOPPED:
            host = ""
        address = vm.public_address if self._settings.pods_are_public else vm.private_address
        guest = self._guests is not None and vm.token in self._guests
        # The end of a guest is its hypervisor's to tell: the VM is there until it is destroyed.
        kept = guest and vm.state is InstanceState.ENDED
        return Instance(
            id=vm.id,
            token=vm.token,
            sandbox_id=vm.sandbox_id,
            state=InstanceState.RUNNING if kept else vm.state,
            address=address if vm.state is not InstanceState.STOPPED else "",
            agent_host=host,
            agent_port=self._settings.agent_port if host and not guest else 0,
            created_at=vm.created_at,
            detail=vm.detail,
            size=vm.size,
            cost_per_hour=self._dollars_of(vm),
            zone=vm.zone,
        )
