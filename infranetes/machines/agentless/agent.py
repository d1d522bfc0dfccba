# SPDX-License-Identifier: Apache-2.0
"""What takes our agent's place where a VM has none: its hypervisor, and a way into its guest if there is one.

The pod's one container is the guest.

    Container   GuestState     what changes it
    CREATED     PREPARED       `create` puts what the guest is told into the VM's CD drives, if it has any
    RUNNING     RUNNING        `start` lets the VM execute; a guest that reboots runs on
    EXITED      OFF, CRASHED   the guest powers off or crashes; `stop` asks for it, and then switches it off

The hypervisor keeps the state while no daemon runs, and `SandboxMemory` what is known of the pod; the node
brings volumes again to an agent that has forgotten them.
"""

from __future__ import annotations

import contextlib
import posixpath
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence

import attrs
from twisted.internet.defer import succeed
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from infranetes.machines.agentless import placing
from infranetes.machines.agentless.access import IPowersOff
from infranetes.machines.agentless.configuration import Configure, GuestDisk, PodFacts
from infranetes.machines.agentless.console import ConsoleCalls
from infranetes.machines.agentless.files import mounted_files
from infranetes.machines.agentless.not_offered import NotOfferedCalls
from infranetes.machines.agentless.opened_later import OpenedLater
from infranetes.machines.agentless.port_forward import forwarded
from infranetes.machines.agentless.states import GuestEvents, container_state
from infranetes.machines.agentless.usage import hypervisors_stats, with_container
from infranetes.machines.agentless.volumes import VolumeCalls
from infranetes.machines.agentless.ways import Ways
from infranetes.machines.interface import CALL_SECONDS, EventStream, IAgent
from infranetes.machines.sandbox_memory import SandboxMemory
from infranetes.machines.sessions import PortForwardCall, SessionCall
from infranetes.providers.hypervisor import GuestState, GuestStatus, IHypervisor
from infranetes_common.concurrency import Flight, Notifier, sleep, start, within
from infranetes_common.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InfranetesError,
    InvalidArgument,
    NotFound,
)
from infranetes_common.filesync.wire import PREFIX
from infranetes_common.reactors import IReactor
from infranetes_common.wire import cri, vmserver

PROVIDER = "machine"  # the container provider that it stands for
# What kubelet mounts into each container, which a guest may do without.
KUBELETS_OWN = ("/var/run/secrets/kubernetes.io/serviceaccount", "/etc/hosts", "/dev/termination-log")
PRESS_AGAIN_SECONDS = 10.0  # a guest that is still booting ignores the power button
FILE_SECONDS = 30
BRING_AGAIN_SECONDS = 10.0  # before a change of a volume that did not reach the guest is brought again
LOGIN_SHELL = ("/bin/sh", "-l")

_log = Logger()


@attrs.frozen
class GuestParts:
    """What an agent without agent is made of.

    :ivar hypervisor: returns the VM's hypervisor. It fails with Unavailable while its provider is starting.
    :ivar container: returns the id of the container that the guest is, by the node's record; "": none.
    :ivar now: returns the time in nanoseconds since 1970 UTC.
    """

    sandbox_id: str
    host: str  # where the guest's ports are
    hypervisor: Callable[[], IHypervisor]
    ways: Ways
    configure: Configure
    memory: SandboxMemory[PodFacts]
    container: Callable[[], str]
    now: Callable[[], int]


@implementer(IAgent)
class AgentlessAgent(VolumeCalls, ConsoleCalls, NotOfferedCalls):
    """See `IAgent`, and the table above.

    :ivar ways: the ways into the guest."""

    def __init__(self, reactor: IReactor, parts: GuestParts) -> None:
        VolumeCalls.__init__(self)
        ConsoleCalls.__init__(self, reactor, parts.hypervisor)
        NotOfferedCalls.__init__(self, parts.sandbox_id)
        self.ways = parts.ways
        self._reactor = reactor
        self._parts = parts
        self._dns = cri.DNSConfig()
        self._remembered: Flight[PodFacts | None] | None = None
        self._unbrought: set[str] = set()  # volumes with changes that did not reach the guest
        self._bringing: Flight[None] | None = None  # brings these
        self._closed = False

    @property
    def _hypervisor(self) -> IHypervisor:
        return self._parts.hypervisor()

    # ---- the VM

    async def info(self, within: float = CALL_SECONDS) -> vmserver.InfoResponse:
        await self._hypervisor.status()
        return vmserver.InfoResponse(
            container_provider=PROVIDER, sandbox_id=self._sandbox_id, now_nanos=self._parts.now()
        )

    async def configure(
        self, config: cri.PodSandboxConfig, node_dns: cri.DNSConfig, contprovider: str = ""
    ) -> None:
        self._dns = config.dns_config if config.dns_config.servers else node_dns

    async def close(self) -> None:
        self._closed = True
        if self._bringing is not None:
            self._bringing.cancel()
        await self.ways.close()

    # ---- the container

    def watch(self) -> EventStream[vmserver.WatchEvent]:
        return GuestEvents(self._parts.hypervisor, self._parts.container)

    async def create(
        self, container_id: str, image_id: str, config: cri.ContainerConfig, sandbox: cri.PodSandboxConfig
    ) -> vmserver.ContainerState:
        if config.command or config.args:
            raise InvalidArgument(
                "a pod whose image is a VM runs what the VM was built for: leave out command and args"
            )
        mounts = {
            posixpath.normpath(mount.container_path): mount.host_path.removeprefix(PREFIX)
            for mount in config.mounts
            if mount.host_path.startswith(PREFIX)
        }
        facts = PodFacts(
            self._sandbox_id,
            sandbox.metadata.namespace,
            sandbox.hostname,
            tuple(self._dns.servers),
            tuple(self._dns.searches),
            {variable.key: variable.value.decode(errors="replace") for variable in config.envs},
            mounts,
            tuple(self._placed_disks(mounts)),
        )
        self._check_without_drives(facts)
        await self._parts.memory.save(facts.sandbox_id, facts)
        self._remembered = Flight(succeed(facts))
        await self._put_cds(facts)
        return container_state(container_id, await self._hypervisor.status())

    def _check_without_drives(self, facts: PodFacts) -> None:
        """Check that a guest that is told nothing by CDs can have what its pod mounts.

        :raise InvalidArgument: it can't."""
        if self._hypervisor.drives:
            return
        if self.disks:
            raise InvalidArgument(
                "a volume that is a disk can't be mounted by a guest of a cloud without our agent: put our "
                "agent into the image, or leave the volume out"
            )
        needed = [path for path, source in facts.mounts.items() if path not in KUBELETS_OWN]
        if needed and not self.ways.any:
            raise InvalidArgument(
                f"what is mounted at {needed[0]} can't reach the guest, which is reached by no way: take "
                "`infranetes.io/guest: ssh`, or leave it out"
            )

    def _check(self, container_id: str) -> None:
        if container_id != self._parts.container():
            raise NotFound(f"there is no container {container_id} in the VM of sandbox {self._sandbox_id}")

    async def start(self, container_id: str) -> vmserver.ContainerState:
        self._check(container_id)
        if (await self._hypervisor.status()).state in (GuestState.OFF, GuestState.CRASHED):
            raise FailedPrecondition(f"container {container_id} has ended: its guest is off")
        status = await self._hypervisor.execute()
        if not self._hypervisor.drives:
            await self._bring_all()
        return container_state(container_id, status)

    async def _bring_all(self) -> None:
        """Begin to bring all volumes into a guest that was not told of them before it booted."""
        facts = await self._facts()
        if facts is not None and self.ways.any:
            self._unbrought.update(source.partition("/")[0] for source in facts.mounts.values())
            self._bring_later(facts, 0.0)

    async def stop(
        self, container_id: str, grace_seconds: int, within: float = CALL_SECONDS
    ) -> vmserver.ContainerState:
        self._check(container_id)
        status = await self._hypervisor.status()
        if status.state is GuestState.RUNNING and grace_seconds > 0:
            status = await self._powered_off(grace_seconds)
        if status.state is GuestState.RUNNING:
            status = await self._hypervisor.switch_off()
        return container_state(container_id, status)

    async def _powered_off(self, seconds: float) -> GuestStatus:
        """Press the power button until the guest is off, or the time is over; return its state then.

        A guest that has no use for a power button may have an agent that does it."""
        clock: IReactorTime = self._reactor
        deadline = clock.seconds() + seconds
        changes = Notifier()
        unwatch = self._hypervisor.watch(lambda status: changes.notify())
        asking = start(self._ask_to_power_off())
        asking.addErrback(lambda _: None)
        try:
            while True:
                changed = changes.wait()
                status = await self._hypervisor.status()
                left = deadline - clock.seconds()
                if status.state is not GuestState.RUNNING or left <= 0:
                    changed.cancel()
                    changed.addErrback(lambda _: None)
                    return status
                await self._hypervisor.press_power_button()
                with contextlib.suppress(DeadlineExceeded):
                    await within(clock, min(left, PRESS_AGAIN_SECONDS), changed, "the guest's end")
        finally:
            asking.cancel()
            unwatch()

    async def _ask_to_power_off(self) -> None:
        way: object = await self.ways.open()
        if IPowersOff.providedBy(way):
            await IPowersOff(way).power_off()

    async def remove(self, container_id: str, within: float = CALL_SECONDS) -> None:
        if self._parts.container() not in ("", container_id):
            return
        try:
            if (await self._hypervisor.status()).state is GuestState.RUNNING:
                await self._hypervisor.switch_off()
        except NotFound:
            pass

    async def update(
        self, container_id: str, resources: cri.LinuxContainerResources
    ) -> vmserver.ContainerState:
        self._check(container_id)  # the VM's size is what limits it
        state = container_state(container_id, await self._hypervisor.status())
        state.resources.CopyFrom(resources)
        return state

    async def stats(self, within: float = CALL_SECONDS) -> vmserver.StatsResponse:
        usage = await self._hypervisor.usage()
        stats = hypervisors_stats(usage, self._parts.now())
        if self.ways.current is not None:
            way = self.ways.current
            try:
                stats = await way.usage()
            except InfranetesError as error:
                self.ways.lost(way, error)
        container = self._parts.container()
        if not container:
            return stats
        status = await self._hypervisor.status()
        return with_container(stats, container, status.started_at, usage.disk_bytes)

    # ---- commands

    async def exec_sync(
        self, container_id: str, command: Sequence[str], seconds: int, limit: float, max_output: int
    ) -> vmserver.ExecSyncResponse:
        self._check(container_id)
        if (await self._hypervisor.status()).state is not GuestState.RUNNING:
            raise FailedPrecondition(f"container {container_id} is not running")
        way = await self.ways.open()
        try:
            return await way.run(command, seconds, limit, max_output)
        except InfranetesError as error:
            self.ways.lost(way, error)
            raise

    def exec(self) -> SessionCall:
        return OpenedLater(self._session)

    async def _session(self, first: vmserver.SessionInput) -> SessionCall:
        call = (await self.ways.open()).session()
        await call.send(first)
        return call

    def shell(self) -> SessionCall:
        async def opened(first: vmserver.SessionInput) -> SessionCall:
            if not first.start.command:
                first.start.command.extend(LOGIN_SHELL)
            return await self._session(first)

        return OpenedLater(opened)

    async def shell_output(self, call: SessionCall) -> AsyncGenerator[vmserver.SessionOutput, None]:
        try:
            async for message in call:
                yield message
                if message.WhichOneof("output") == "end":
                    return
        finally:
            call.cancel()
        raise InfranetesError("the shell ended without an exit code")

    def port_forward(self) -> PortForwardCall:
        return forwarded(self._reactor, self._parts.host)

    # ---- what the guest is told

    async def volume_changed(self, id: str) -> None:
        """Bring a changed volume of a guest that executes into it, and the change into its CDs."""
        facts = await self._facts()
        if facts is None or not _mounts_of(facts, id):
            return  # its container is not created yet
        await self._put_cds(facts)
        if (await self._hypervisor.status()).state is GuestState.RUNNING:
            self._unbrought.add(id)
            await self._bring(facts)
            if self._unbrought:
                self._bring_later(facts, BRING_AGAIN_SECONDS)

    async def _facts(self) -> PodFacts | None:
        """Return the pod's facts, of an earlier daemon if need be; None: its container is not created yet."""
        if self._remembered is None:
            self._remembered = Flight(self._parts.memory.load(self._sandbox_id))
        return await self._remembered.join()

    async def _put_cds(self, facts: PodFacts) -> None:
        if not self._hypervisor.drives:
            return  # it was told at its launch
        files = mounted_files(self.volumes, facts.mounts)
        configuration = await self._parts.configure(facts, files)
        await self._hypervisor.insert_cds(configuration.cds(await self._hypervisor.network()))

    def _placed_disks(self, mounts: Mapping[str, str]) -> Iterator[GuestDisk]:
        for path, source in mounts.items():
            if (disk := self.disks.get(source.partition("/")[0])) is not None:
                yield attrs.evolve(disk, mount_path=path)
        yield from (disk for disk in self.disks.values() if not disk.filesystem)

    async def _bring(self, facts: PodFacts) -> None:
        """Bring volumes that have changed into the guest. What does not reach it stays unbrought."""
        for id in sorted(self._unbrought):
            try:
                await self._bring_one(facts, id)
                self._unbrought.discard(id)
            except FailedPrecondition:  # there is no way into it, or not yet
                break
            except InfranetesError as error:
                _log.info("volume {volume} of sandbox {sandbox} is not up to date in its guest: {error}",
                          volume=id, sandbox=self._sandbox_id, error=error)  # fmt: skip
                break

    def _bring_later(self, facts: PodFacts, seconds: float) -> None:
        """Begin to bring what is unbrought, the first time in some seconds, unless that has begun."""
        if not self._closed and (self._bringing is None or self._bringing.done):
            self._bringing = Flight(self._bring_until_done(facts, seconds))
            self._bringing.join().addErrback(self._not_brought)

    async def _bring_until_done(self, facts: PodFacts, seconds: float) -> None:
        while self._unbrought:
            await sleep(self._reactor, seconds)
            await self._bring(facts)
            seconds = BRING_AGAIN_SECONDS

    def _not_brought(self, failure: Failure) -> None:
        if not self._closed:
            _log.failure("bringing volumes into a guest failed", failure)

    async def _bring_one(self, facts: PodFacts, id: str) -> None:
        if id not in self.volumes:
            return
        volume = self.volumes.get(id)
        for path, source in _mounts_of(facts, id).items():
            files = volume.files(source.partition("/")[2])
            single = files.get("")
            if single is not None and (self._hypervisor.drives or path.startswith("/dev/")):
                continue  # a single file, which kubelet does not change either
            way = await self.ways.open()
            try:
                if single is None:
                    await way.put_files(path, files)
                else:
                    command = placing.file_command(path, single)
                    placing.check(await way.run(command, FILE_SECONDS, 0, 4096, single.content), path)
            except InfranetesError as error:
                self.ways.lost(way, error)
                raise


def _mounts_of(facts: PodFacts, id: str) -> Mapping[str, str]:
    return {path: source for path, source in facts.mounts.items() if source.partition("/")[0] == id}
