"""What everything in `pods` works with: the outside world, the settings and the inventory."""

from __future__ import annotations

from typing import Any

import attrs
from twisted.internet.defer import Deferred, DeferredSemaphore, succeed
from twisted.logger import Logger

from infranetes.agent.client import Connect
from infranetes.agent.view import ViewTimes
from infranetes.hostports.hostports import NoHostPorts
from infranetes.pods import apparmor
from infranetes.pods.inventory import Container, Inventory, Sandbox
from infranetes.pods.records import ContainerRecord, SandboxRecord
from infranetes.pods.states import SandboxState
from infranetes.pods.waits import Signal, within
from infranetes_common.errors import Unavailable, Unimplemented

DAY = 86400.0
# The rest of a log of a container that is the VM: its agent ends with it, and says nothing later.
MACHINE_DRAIN_SECONDS = 3.0


@attrs.frozen
class Times:
    """How long things may take, and other patience. Seconds."""

    launch: float = 600.0  # from the first request to a READY sandbox
    desertion: float = 600.0  # how long a launch that nobody waits for is kept for who asks again
    listing: float = 0.25  # what a list gives VMs whose stream was just lost
    drain: float = 15.0  # the rest of a log, once its container has ended
    stopping: float = 20.0  # ending the containers of a sandbox that is to go
    destroy: float = 120.0  # the provider's part of ending a VM
    sweep: float = 60.0  # between two passes over the provider's list
    exec_limit: float = 3600.0  # an ExecSync that names no timeout
    certificate: float = DAY  # how long a VM's certificate is good for; replaced after half of that
    view: ViewTimes = attrs.field(factory=ViewTimes)


@attrs.frozen
class NodeNames:
    """Who this node is in the IaaS."""

    cluster: str
    node: str


class NoVolumes:
    """In the place of `volumes.volumes.Volumes`, where there is none: containers have no mounts."""

    async def bring(self, container: Container, config: Any) -> Any:
        """`config`. :raise Unimplemented: it has mounts."""
        if config.mounts:
            raise Unimplemented("mounts are not offered here")
        return config

    async def release(self, container: Container) -> None:
        """Nothing to do."""

    def flush(self, container: Container) -> Deferred[None]:
        """It is done."""
        return succeed(None)

    def forget(self, sandbox: Sandbox) -> None:
        """Nothing to do."""


class NoPool:
    """In the place of `pods.pool.Pool`, where there is none."""

    drained = False

    async def claim(self, sandbox: Sandbox) -> bool:
        """There is no VM to be had."""
        return False

    def owns(self, token: str) -> bool:
        """Nothing."""
        return False

    def idle(self) -> list[Any]:
        """None."""
        return []

    async def check(self, by_token: Any) -> None:
        """Nothing to do."""


class NoRenewal:
    """In the place of `pods.renewal.Renewal`, where certificates are never replaced."""

    def soon(self, sandbox: Sandbox) -> None:
        """Nothing to do."""


class Node:
    """The outside world as one object.

    :param store: `pods.store.Store`, open. :param provider: IPodProvider. :param images: the ImageStore.
    :param authority: issues the VMs' certificates. :param connect: makes the agents' clients.
    :param logs: what keeps the containers' log files, `pods.logs.Logs`.
    :param volumes: what carries their mounts, `volumes.volumes.Volumes`; None: nothing does.
    :ivar apparmor: the directory of the node's AppArmor profiles.
    :ivar pool: VMs that wait for a pod, `pods.pool.Pool`. :ivar renewal: replaces certificates.
    """

    def __init__(
        self,
        clock: Any,
        store: Any,
        provider: Any,
        images: Any,
        authority: Any,
        connect: Connect,
        logs: Any,
        names: NodeNames,
        times: Times = Times(),
        parallel: int = 64,
        volumes: Any = None,
    ) -> None:
        self.clock = clock
        self.store = store
        self.provider = provider
        self.images = images
        self.authority = authority
        self.connect = connect
        self.logs = logs
        self.volumes: Any = volumes if volumes is not None else NoVolumes()
        self.names = names
        self.apparmor = apparmor.DEFAULT_DIRECTORY
        self.times = times
        self.inventory = Inventory()
        self.pool: Any = NoPool()
        self.renewal: Any = NoRenewal()
        self.hostports: Any = NoHostPorts()
        self.gate = DeferredSemaphore(parallel)  # views that connect at once
        self.ready = Signal()  # the provider has started
        self.trouble = "the daemon is starting"  # why no VM can be launched or destroyed; "": they can
        self.stopping = False  # the daemon ends: what is under way is left for the next one
        self._log = Logger()

    def now(self) -> int:
        """Nanoseconds since 1970 UTC."""
        return int(self.clock.seconds() * 1e9)

    def save(self, sandbox: Sandbox, record: SandboxRecord) -> Deferred[None]:
        """Make `record` the sandbox's, here and on the disk; fires when it is there."""
        if record.state is SandboxState.ABANDONED:
            self.inventory.release_name(sandbox)
        sandbox.record = record
        return self.store.put_sandbox(record)  # type: ignore[no-any-return]

    async def commit(self, sandbox: Sandbox, record: SandboxRecord) -> None:
        """As `save`, but the sandbox is in its new state only once the disk says so."""
        await self.store.put_sandbox(record)
        sandbox.record = record

    def save_container(self, container: Container, record: ContainerRecord) -> Deferred[None]:
        """Make `record` the container's, here and on the disk; fires when it is there."""
        container.record = record
        return self.store.put_container(record)  # type: ignore[no-any-return]

    def check_ready(self) -> None:
        """Before the provider is asked for anything. :raise Unavailable: it is not ready; says why."""
        if self.trouble:
            raise Unavailable(f"provider {self.provider.name} is not ready: {self.trouble}")

    async def destroy_vm(self, sandbox: Any) -> None:
        """End the VM of a sandbox or of the pool, if there is one, and give back what it holds."""
        self.check_ready()
        await self.hostports.take(sandbox.id)  # its address may be another one's next
        ids = {sandbox.record.instance_id} - {""}
        if not ids:  # the provider's answer was never recorded; it knows the token
            instances = await within(
                self.clock, self.times.destroy, self.provider.list(), "listing the provider's VMs"
            )
            ids = {one.id for one in instances if one.token == sandbox.record.token}
        for instance_id in ids:
            what = f"destroying the VM of sandbox {sandbox.id}"
            await within(self.clock, self.times.destroy, self.provider.destroy(instance_id), what)

    def note(self, write: Deferred[None], what: str) -> None:
        """Let a write go on by itself: what it records is true already and can be learnt again."""
        write.addErrback(lambda failure: self._log.error("{what} was not recorded: {error}",
                                                         what=what, error=failure.value))  # fmt: skip
