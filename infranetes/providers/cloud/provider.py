"""The PodProvider over any cloud: intent, waiting, ending, and nothing left behind.

What the cloud says of a VM, and what is made of it:

cloud          InstanceState   next
asked for      PENDING         RUNNING, ENDED
executing      RUNNING         ENDED       told to watchers unless `destroy` was asked for
stopped, gone  ENDED           (none)      `destroy`

A launch goes on when its caller goes away; the next call for its token waits for it and has its VM.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from ipaddress import IPv4Network
from typing import Any, TypeVar

from twisted.internet.defer import Deferred, succeed
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from infranetes.providers.cloud.calls import Calls
from infranetes.providers.cloud.catalogue import MachineImages
from infranetes.providers.cloud.interface import CloudError, Found, ICloud, Trouble
from infranetes.providers.cloud.launch import Launcher
from infranetes.providers.cloud.marks import Marks
from infranetes.providers.cloud.settings import CloudSettings
from infranetes.providers.cloud.sweep import Sweeper
from infranetes.providers.cloud.translate import failed
from infranetes.providers.cloud.view import View
from infranetes.providers.cloud.watch import Watcher
from infranetes.providers.cloud.works import Works
from infranetes.providers.interface import (
    IHasCatalogue,
    Instance,
    InstanceSpec,
    InstanceState,
    IPodProvider,
    Progress,
    ProviderContext,
)
from infranetes.threads import in_thread
from infranetes_common.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    Unavailable,
)

T = TypeVar("T")

CONSOLE_CHARACTERS = 1000

_log = Logger()


@implementer(IPodProvider, IHasCatalogue)
class CloudProvider:
    """See `IPodProvider`."""

    def __init__(
        self, reactor: Any, cloud: ICloud, settings: CloudSettings, context: ProviderContext
    ) -> None:
        self.name = cloud.name
        self._reactor = reactor
        self._cloud = cloud
        self._settings = settings
        self._prices: dict[str, float | None] = {}
        self._network = ""
        self._started = False
        self._unwanted: set[str] = set()  # ids that are being destroyed by ourselves
        self._works = Works()
        self._calls = Calls(reactor, cloud, settings)
        self.catalogue = MachineImages(cloud, self._asked)
        self._view = View(reactor.seconds, settings.settle_seconds)
        self._marks = Marks(context.state_dir / cloud.name / "destroyed")
        self._watcher = Watcher(
            reactor, cloud, settings, self._calls, self._view, self._instance, self._end_unwanted
        )
        self._launcher = Launcher(
            reactor, cloud, settings, context, self._calls, self._view, self._watcher.unwanted, self._end
        )
        self._sweeper = Sweeper(reactor, cloud, settings, self._calls, self._view, self._works.busy)

    # ---- IPodProvider

    def start(self, progress: Progress) -> Deferred[None]:
        return self._public(self._start(progress))

    def stop(self) -> Deferred[None]:
        async def stop() -> None:
            self._watcher.stop()
            self._sweeper.stop()
            self._works.stop()
            await self._calls.stop()

        return Deferred.fromCoroutine(stop())

    def configure_network(self, pod_cidr: str) -> Deferred[None]:
        async def configure() -> None:
            try:
                self._network = str(IPv4Network(pod_cidr))
            except ValueError as error:
                raise InvalidArgument(f"pod CIDR {pod_cidr!r} is not an IPv4 subnet: {error}") from None
            await succeed(None)

        return self._public(configure())

    def launch(self, spec: InstanceSpec) -> Deferred[Instance]:
        async def launch() -> Instance:
            self._check_started()
            return self._instance(await self._works.one_at_a_time(spec.token, self._launcher.launch(spec)))

        return self._public(launch(), spec.token)

    def wait_running(self, instance_id: str, timeout: float) -> Deferred[Instance]:
        def too_late(outcome: Any, _: float) -> Any:
            raise DeadlineExceeded(
                f"VM {instance_id} is not running after {timeout:g} s; it may need longer to boot, "
                "or its console says why it does not"
            )

        waiting = self._public(self._wait_running(instance_id))
        return waiting.addTimeout(timeout, self._reactor, too_late)

    def get(self, instance_id: str) -> Deferred[Instance]:
        async def get() -> Instance:
            self._check_started()
            return self._instance(await self._get(instance_id))

        return self._public(get())

    def list(self) -> Deferred[list[Instance]]:
        async def list_ours() -> list[Instance]:
            self._check_started()
            for token in list(self._works.deserted):
                await self._works.free(token)
            founds = await self._calls.call("list VMs", self._cloud._thd_list)
            listed = self._view.merge(founds)
            self._watcher.notice()
            extra = {one.id for one in self._view.twins()} | self._unwanted
            return [self._instance(one) for one in listed if one.id not in extra]

        return self._public(list_ours())

    def destroy(self, instance_id: str) -> Deferred[None]:
        async def destroy() -> None:
            self._check_started()
            try:
                found = await self._get(instance_id)
            except NotFound:
                return
            await self._works.one_at_a_time(found.token, self._end(found))

        return self._public(destroy())

    def watch(self, ended: Callable[[Instance], None]) -> None:
        self._watcher.watchers.append(ended)

    def status(self) -> Mapping[str, str]:
        states = [known.found.state for known in self._view.vms.values()]
        calls = self._calls
        return {
            "cloud": f"{self._cloud.place}, {'not answering' if calls.is_open else 'answering'}",
            "calls": f"{calls.made} made, {calls.failed} failed, {calls.limit.current:.1f} a second at most",
            **{f"VMs {state.value}": str(states.count(state)) for state in InstanceState},
        }

    # ---- Bodies

    def _public(self, body: Coroutine[Any, Any, T], key: str = "") -> Deferred[T]:
        """`body` to its end, its failures in Infranetes' own words."""

        async def translated() -> T:
            try:
                return await body
            except CloudError as error:
                raise failed(self._cloud.place, error) from error

        return self._works.begin(translated(), key)

    def _asked(self, what: str, work: Callable[[Any], Any]) -> Deferred[Any]:
        """What the cloud answers to the catalogue."""

        async def ask() -> Any:
            self._check_started()
            return await self._calls.call(what, work)

        return self._public(ask())

    def _check_started(self) -> None:
        if not self._started:
            raise Unavailable(f"provider {self.name} has not started")

    async def _start(self, progress: Progress) -> None:
        progress(f"asking {self._cloud.place} for what the configuration names")
        if not self._started:
            await self._calls.start()
        self._view.destroyed.update(await in_thread(self._reactor, self._marks._thd_load))
        try:
            architecture = await self._calls.call("check the configuration", self._cloud._thd_check)
        except CloudError as error:
            if error.trouble in (Trouble.INVALID, Trouble.MISSING):
                raise FailedPrecondition(f"{self._cloud.place}: {error}; see the configuration") from error
            raise
        self._launcher.architecture = architecture
        self._prices = {offer.name: offer.price for offer in self._cloud.offers}
        founds = await self._calls.call("list VMs", self._cloud._thd_list)
        self._view.merge(founds)
        await in_thread(self._reactor, partial(self._marks._thd_prune, {one.id for one in founds}))
        if not self._started:
            self._started = True
            for loop in (self._watcher.run(), self._sweeper.run()):
                self._works.begin(loop).addErrback(lambda failure: failure.trap(Unavailable))

    async def _get(self, instance_id: str) -> Found:
        if self._cloud.is_id(instance_id) and instance_id not in self._view.destroyed:
            work = partial(self._thd_get, instance_id)
            found: Found | None = await self._calls.call(f"look at VM {instance_id}", work)
            if instance_id not in self._view.destroyed:
                if found is not None:
                    found = self._view.put(found)
                    self._watcher.notice()
                    return found
                known = self._view.vms.get(instance_id)
                if known is not None and self._view.is_fresh(known):
                    return known.found
        raise NotFound(f"no VM of this node is called {instance_id[:64]!r} at {self._cloud.place}")

    def _thd_get(self, id: str, driver: Any) -> Found | None:
        return self._cloud._thd_get(driver, id)

    async def _wait_running(self, instance_id: str) -> Instance:
        self._check_started()
        known = self._view.vms.get(instance_id)
        found = known.found if known is not None else await self._get(instance_id)
        with self._watcher.waiting(instance_id) as changed:
            while True:
                if found.state is InstanceState.RUNNING and found.private_address:
                    if not found.wanted_address or found.public_address:
                        return self._instance(found)
                    await self._calls.call(
                        f"give VM {instance_id} its address", partial(self._thd_address, found)
                    )
                    found = await self._get(instance_id)
                    if found.public_address:
                        continue
                if found.state is InstanceState.ENDED:
                    raise Unavailable(await self._why(found))
                await changed()
                if instance_id not in self._view.vms:
                    raise NotFound(f"VM {instance_id} was destroyed meanwhile")
                found = self._view.vms[instance_id].found

    def _thd_address(self, found: Found, driver: Any) -> None:
        self._cloud._thd_address(driver, found)

    async def _why(self, found: Found) -> str:
        try:
            console = await self._calls.call(
                f"read the console of VM {found.id}",
                lambda driver: self._cloud._thd_console(driver, found.id),
                seconds=self._settings.call_seconds,
            )
        except CloudError:
            console = ""
        tail = f"; its console ends with: {console[-CONSOLE_CHARACTERS:]}" if console else ""
        return f"VM {found.id} has ended: {found.detail or 'the cloud gives no reason'}{tail}"

    async def _end(self, found: Found) -> None:
        """Destroy a VM and all it holds, and remember that."""
        if found.id in self._view.destroyed:
            return
        self._watcher.destroying.add(found.id)
        try:
            deadline = self._reactor.seconds() + self._settings.destroy_seconds
            what = f"destroy VM {found.id}"
            while not await self._has_ended(found, what):
                if self._reactor.seconds() > deadline:
                    raise CloudError(Trouble.PASSING, f"{what}: it is still ending")
                await self._watcher.pause(self._settings.poll_seconds)
            await in_thread(self._reactor, self._marks._thd_add, found.id, found.token)
            self._view.gone(found.id, found.token)
            self._watcher.notice()
        finally:
            self._watcher.destroying.discard(found.id)

    async def _has_ended(self, found: Found, what: str) -> bool:
        """Ask for a VM's end; whether it has come, and all is released."""
        try:
            return await self._calls.call(what, lambda driver: self._cloud._thd_destroy(driver, found))
        except CloudError as error:
            known = self._view.vms.get(found.id)
            if error.trouble is not Trouble.MISSING:
                raise
            if known is not None and self._view.is_fresh(known):
                return False  # it was made a moment ago: not all of the cloud knows it yet
        await self._calls.call(what, lambda driver: self._cloud._thd_release_all(driver, found))
        return True

    def _end_unwanted(self, found: Found, why: str) -> None:
        """A VM that nobody was told of."""
        if found.id in self._unwanted:
            return
        self._unwanted.add(found.id)
        _log.warn("{cloud}: VM {vm} is destroyed: {why}", cloud=self._cloud.place, vm=found.id, why=why)

        def done(outcome: Any) -> None:
            self._unwanted.discard(found.id)
            if isinstance(outcome, Failure):
                _log.warn("VM {vm} is not destroyed yet: {error}", vm=found.id, error=outcome.value)

        self._public(self._works.one_at_a_time(found.token, self._end(found))).addBoth(done)

    def _instance(self, found: Found) -> Instance:
        public = self._settings.agent_address == "public"
        host = found.public_address if public else found.private_address
        return Instance(
            id=found.id,
            token=found.token,
            sandbox_id=found.sandbox_id,
            state=found.state,
            address=found.private_address,
            agent_host=host,
            agent_port=self._settings.agent_port if host else 0,
            created_at=found.created_at,
            detail=found.detail,
            size=found.size,
            cost_per_hour=self._prices.get(found.size),
        )
