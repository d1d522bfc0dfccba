# SPDX-License-Identifier: Apache-2.0
"""A VM's agent, faked in memory."""

from __future__ import annotations

import functools
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from typing import ParamSpec, TypeVar, cast

from twisted.internet.defer import Deferred

from infranetes.machines.keeping import Adoption, Hook
from infranetes.providers.interface import MemoryRange
from infranetes_common.concurrency import Coro
from infranetes_common.errors import FailedPrecondition, NotFound, Unavailable
from infranetes_common.nfs import NfsMount
from infranetes_common.pod_firewall import PodFirewall
from infranetes_common.wire import cri, vmserver
from tests.infranetes.pods.scheduling import Kind
from txgrpc import Code, GrpcError

P = ParamSpec("P")
T = TypeVar("T")


def call(method: Callable[P, Awaitable[T]]) -> Callable[P, Coro[T]]:
    """Make a method of FakeAgent a call to it, which the scheduler lets happen."""
    name = getattr(method, "__name__", "")

    @functools.wraps(method)
    async def asked(*args: P.args, **kwargs: P.kwargs) -> T:
        agent = cast(FakeAgent, args[0])
        words = f"agent {agent.sandbox_id[:6]} {name}"
        return await agent.scheduler.ask_agent(words, lambda: method(*args, **kwargs))

    return asked


class FakeStream:
    """A Watch stream that the test feeds."""

    def __init__(self) -> None:
        self._events: list[vmserver.WatchEvent | Exception] = []
        self._waiting: Deferred[vmserver.WatchEvent] | None = None
        self.ended = False

    def feed(self, event: vmserver.WatchEvent) -> None:
        if self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            waiting.callback(event)
        else:
            self._events.append(event)

    def break_(self, error: Exception) -> None:
        if self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            waiting.errback(error)
        else:
            self._events.append(error)

    def cancel(self) -> None:
        if not self.ended:
            self.ended = True
            self.break_(GrpcError(Code.CANCELLED, "cancelled here"))

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> vmserver.WatchEvent:
        if not self._events:
            self._waiting = Deferred()
            return await self._waiting
        event = self._events.pop(0)
        if isinstance(event, Exception):
            raise event
        return event


class FakeAgent:
    """One VM's agent and the containers in it; stands in for AgentClient.

    :ivar away: it can't be reached. :ivar silent: streams open and send nothing.
    :ivar holding: a Deferred for which each create and load waits first.
    :ivar clocks: what its machine's clocks show when it is asked: the time, and the steady clock.
    :ivar corrections: the corrections of the clocks that it was sent.
    :ivar interruption: the notice of its machine's end, once there is one; see `interrupt`.
    """

    def __init__(self, sandbox_id: str, scheduler: Kind | None = None) -> None:
        self.sandbox_id = sandbox_id
        self.scheduler = scheduler or Kind()
        self.containers: dict[str, vmserver.ContainerState] = {}
        self.created: list[cri.ContainerConfig] = []  # what it was asked to create
        self.loaded: set[str] = set()
        self.loads: list[tuple[str, bytes | str]] = []  # an archive, or an address
        self.calls: list[tuple[str, str]] = []
        self.streams: list[FakeStream] = []
        self.configured: list[cri.PodSandboxConfig] = []
        self.node_dns: list[cri.DNSConfig] = []
        self.chosen: list[str] = []
        self.configure_error: Exception | None = None
        self.certificates: list[str] = []
        self.attests: Callable[[bytes], vmserver.AttestResponse] = lambda nonce: vmserver.AttestResponse()
        self.reconnected = 0
        self.clocks: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self.corrections: list[tuple[int, int, int]] = []
        self.correct_error: Exception | None = None
        self.warmed_up = 0
        self.firewalls: list[PodFirewall] = []
        self.tunnel_port = 0
        self.released: list[Sequence[MemoryRange]] = []
        self.release_error: Exception | None = None
        self.processors: list[int] = []
        self.held = False
        self.holds: list[tuple[dict[str, Hook], set[str], bool]] = []
        self.hold_error: Exception | None = None
        self.adopted: list[tuple[list[Adoption], dict[str, str], cri.PodSandboxConfig]] = []
        self.away = False
        self.silent = False
        self.holding: Deferred[None] | None = None
        self.create_error: Exception | None = None
        self.exec_error: Exception | None = None
        self.disks: set[str] = set()
        self.nfs: dict[str, set[str]] = {}  # the containers that use each mount, by the mount's id
        self.mount_error: Exception | None = None
        self.unmount_error: Exception | None = None
        self.huge_page_sizes: list[int] = []
        self.sync_error: Exception | None = None
        self.interruption: vmserver.Interruption | None = None

    def _reach(self) -> None:
        if self.away:
            raise Unavailable(f"the agent of sandbox {self.sandbox_id} can't be reached")

    @call
    async def info(self, within: float = 30.0) -> vmserver.InfoResponse:
        self._reach()
        now, steady = self.clocks()
        return vmserver.InfoResponse(
            sandbox_id=self.sandbox_id,
            container_provider="docker",
            now_nanos=now,
            steady_nanos=steady,
            huge_page_sizes=self.huge_page_sizes,
            held=self.held,
        )

    @call
    async def correct_clock(self, steady: int, earliest: int, latest: int) -> None:
        self._reach()
        if self.correct_error is not None:
            raise self.correct_error
        self.corrections.append((steady, earliest, latest))

    @call
    async def new_key(self, within: float = 30.0) -> bytes:
        self._reach()
        return self.sandbox_id.encode()

    @call
    async def rekey(self, certificate: str, within: float = 30.0) -> None:
        self._reach()
        self.certificates.append(certificate)

    @call
    async def attest(self, nonce: bytes) -> vmserver.AttestResponse:
        self._reach()
        return self.attests(nonce)

    def reconnect(self) -> None:
        self.reconnected += 1

    @call
    async def configure(
        self, config: cri.PodSandboxConfig, node_dns: cri.DNSConfig, contprovider: str = ""
    ) -> None:
        self._reach()
        self.configured.append(config)
        self.node_dns.append(node_dns)
        self.chosen.append(contprovider)
        if self.configure_error is not None:
            raise self.configure_error

    @call
    async def warm_up(self) -> None:
        self._reach()
        self.warmed_up += 1

    @call
    async def release_memory(self, ranges: Sequence[MemoryRange], seconds: float) -> None:
        self._reach()
        if self.release_error is not None:
            raise self.release_error
        self.released.append(ranges)

    @call
    async def use_processors(self, count: int) -> None:
        self._reach()
        self.processors.append(count)

    @call
    async def hold(
        self,
        hooks: Mapping[str, Hook],
        volumes: Collection[str],
        *,
        keep_secrets: bool = False,
        seconds: float = 10.0,
    ) -> list[str]:
        self._reach()
        if self.hold_error is not None:
            raise self.hold_error
        self.held = True
        self.holds.append((dict(hooks), set(volumes), keep_secrets))
        return [id for id, one in self.containers.items() if one.state == cri.CONTAINER_RUNNING]

    @call
    async def release(self) -> None:
        self._reach()
        self.held = False

    @call
    async def adopt(
        self, containers: Sequence[Adoption], volumes: Mapping[str, str], sandbox: cri.PodSandboxConfig
    ) -> list[vmserver.ContainerState]:
        self._reach()
        self.adopted.append((list(containers), dict(volumes), sandbox))
        for each in containers:
            self.become(each.new_id, cri.CONTAINER_CREATED)
        return [self.containers[each.new_id] for each in containers]

    @call
    async def set_firewall(self, firewall: PodFirewall, tunnel_port: int = 0) -> None:
        self._reach()
        self.firewalls.append(firewall)
        self.tunnel_port = tunnel_port

    def watch(self) -> FakeStream:
        stream = FakeStream()
        if self.away:
            stream.break_(GrpcError(Code.UNAVAILABLE, "refused"))
            return stream
        self.streams.append(stream)
        if not self.silent:
            for state in self.containers.values():
                stream.feed(vmserver.WatchEvent(container=state))
            stream.feed(vmserver.WatchEvent(synced=vmserver.Synced()))
            if self.interruption is not None:
                stream.feed(vmserver.WatchEvent(interruption=self.interruption))
        return stream

    def interrupt(self, reason: str) -> None:
        """Notify of the cloud's intent to take the machine away."""
        self.interruption = vmserver.Interruption(at_nanos=1, reason=reason)
        for stream in self.streams:
            stream.feed(vmserver.WatchEvent(interruption=self.interruption))

    def go_away(self) -> None:
        """Lose the connection, so that it can't be made again."""
        self.away = True
        streams, self.streams = self.streams, []
        for stream in streams:
            stream.break_(GrpcError(Code.UNAVAILABLE, "connection lost"))

    def become(self, id: str, state: cri.ContainerState, **fields: object) -> vmserver.ContainerState:
        """Change a container's state by itself."""
        known = self.containers.setdefault(id, vmserver.ContainerState(id=id, created_at=5))
        known.state = state
        for name, value in fields.items():
            setattr(known, name, value)
        copy = vmserver.ContainerState()
        copy.CopyFrom(known)
        for stream in self.streams:
            stream.feed(vmserver.WatchEvent(container=copy))
        return copy

    @call
    async def images(self) -> set[str]:
        self._reach()
        return set(self.loaded)

    @call
    async def missing_layers(self, diff_ids: Sequence[str]) -> int:
        return 1

    @call
    async def load_image(self, image_id: str, archive: AsyncIterator[bytes]) -> None:
        if self.holding is not None:
            await self.holding
        self._reach()
        data = b"".join([part async for part in archive])
        self.loads.append((image_id, data))
        self.loaded.add(image_id)

    @call
    async def fetch_image(self, image_id: str, url: str) -> None:
        self._reach()
        self.loads.append((image_id, url))
        self.loaded.add(image_id)

    @call
    async def create(
        self, id: str, image_id: str, config: cri.ContainerConfig, sandbox: cri.PodSandboxConfig
    ) -> vmserver.ContainerState:
        self.calls.append(("create", id))
        self.created.append(config)
        self._reach()
        if self.create_error is not None:
            raise self.create_error
        if image_id not in self.loaded:
            raise FailedPrecondition(f"image {image_id} is not loaded")
        made = self.containers.setdefault(id, vmserver.ContainerState(id=id, created_at=5))
        made.resources.CopyFrom(config.linux.resources)
        return self.become(id, cri.CONTAINER_CREATED)

    @call
    async def start(self, id: str) -> vmserver.ContainerState:
        self._reach()
        return self.become(id, cri.CONTAINER_RUNNING, started_at=6)

    @call
    async def stop(self, id: str, grace_seconds: int, within: float = 30.0) -> vmserver.ContainerState:
        self.calls.append((f"stop {grace_seconds}", id))
        self._reach()
        if id not in self.containers:
            raise NotFound(f"no container {id}")
        return self.become(id, cri.CONTAINER_EXITED, finished_at=7, exit_code=143, reason="Error")

    @call
    async def remove(self, id: str, within: float = 30.0) -> None:
        self.calls.append(("remove", id))
        self._reach()
        self.nfs = {nfs: used - {id} for nfs, used in self.nfs.items() if used - {id}}
        if self.containers.pop(id, None) is not None:
            for stream in self.streams:
                stream.feed(vmserver.WatchEvent(removed=id))

    @call
    async def update(self, id: str, resources: cri.LinuxContainerResources) -> vmserver.ContainerState:
        self._reach()
        self.containers[id].resources.CopyFrom(resources)
        return self.become(id, self.containers[id].state)

    @call
    async def exec_sync(
        self, id: str, command: Sequence[str], seconds: int, limit: float, max_output: int
    ) -> vmserver.ExecSyncResponse:
        self._reach()
        self.calls.append((f"exec {' '.join(command)} {seconds} {limit:.0f}", id))
        if self.exec_error is not None:
            raise self.exec_error
        return vmserver.ExecSyncResponse(stdout=b"out", stderr=b"err", exit_code=3)

    @call
    async def mount_disk(
        self, serial: str, filesystem: str, options: Iterable[str], *, read_only: bool, group: int | None
    ) -> None:
        self.calls.append((f"mount {filesystem} {','.join(options)} {read_only} {group}", serial))
        self._reach()
        if self.mount_error is not None:
            raise self.mount_error
        self.disks.add(serial)

    @call
    async def find_disk(self, serial: str) -> str:
        self.calls.append(("find", serial))
        self._reach()
        if self.mount_error is not None:
            raise self.mount_error
        self.disks.add(serial)
        return f"/dev/{serial[:4]}"

    @call
    async def sync_disk(self, serial: str) -> None:
        self.calls.append(("sync", serial))
        self._reach()
        if self.sync_error is not None:
            raise self.sync_error

    @call
    async def unmount_disk(self, serial: str, within: float) -> None:
        self.calls.append(("unmount", serial))
        self._reach()
        if self.unmount_error is not None:
            raise self.unmount_error
        self.disks.discard(serial)

    @call
    async def mount_nfs(self, container_id: str, mount: NfsMount) -> str:
        self.calls.append((f"mount_nfs {mount.source}", container_id))
        self._reach()
        if self.mount_error is not None:
            raise self.mount_error
        self.nfs.setdefault(mount.id, set()).add(container_id)
        return str(mount.id)

    @call
    async def unmount_nfs(self, within: int) -> None:
        self.calls.append(("unmount_nfs", str(within)))
        self._reach()
        if self.unmount_error is not None:
            raise self.unmount_error
        self.nfs.clear()

    @call
    async def disk_usage(self, serial: str, *, grow: bool = False) -> vmserver.DiskUsageResponse:
        self._reach()
        if serial not in self.disks:
            raise NotFound(f"disk {serial} is not mounted")
        return vmserver.DiskUsageResponse(total_bytes=1000 + grow, used_bytes=10)

    async def close(self) -> None:
        streams, self.streams = self.streams, []
        for stream in streams:
            stream.break_(GrpcError(Code.UNAVAILABLE, "closed here"))
