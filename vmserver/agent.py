"""The Agent service of ``proto/vmserver.proto``: checks what comes in and hands it to the provider."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import AsyncIterator, Callable
from importlib import metadata
from typing import Any

from twisted.internet.defer import Deferred
from twisted.logger import Logger

from infranetes_common import cri
from infranetes_common import vmserver as messages
from infranetes_common.errors import FailedPrecondition, InvalidArgument, ResourceExhausted, Unimplemented
from vmserver import validate
from vmserver.containers.interface import IContainerProvider, IImageFetcher
from vmserver.keys import Keys
from vmserver.metadata import MetadataGate
from vmserver.sandbox import Sandbox
from vmserver.sessions import SessionCalls
from vmserver.stats.calls import StatsCalls
from vmserver.volumes.calls import VolumeCalls
from vmserver.volumes.store import VolumeStore, mounted

MAX_OUTPUT_BYTES = 16 * 1024 * 1024
MAX_PIECE_BYTES = 1024 * 1024

_log = Logger()
_RANK = {
    cri.CONTAINER_CREATED: 1,
    cri.CONTAINER_RUNNING: 2,
    cri.CONTAINER_EXITED: 3,
}


def _version() -> str:
    try:
        return metadata.version("infranetes")
    except metadata.PackageNotFoundError:
        return "0"


class Watcher:
    """What one watcher has not been sent yet: the latest of each container, so its size is bounded.

    A watcher that reads slowly misses states in between, never the last one.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, Any] = {}  # id -> WatchEvent, in the order of the first change unsent
        self._wake: Deferred[None] | None = None

    def changed(self, state: Any) -> None:
        """A container has changed."""
        self._put(state.id, messages.WatchEvent(container=state))

    def removed(self, id: str) -> None:
        """A container is gone."""
        self._put(id, messages.WatchEvent(removed=id))

    def take(self) -> dict[str, Any]:
        """What has come since the last time."""
        taken, self._waiting = self._waiting, {}
        return taken

    async def wait(self) -> None:
        """Until something has come."""
        if not self._waiting:
            self._wake = Deferred()
            await self._wake

    def _put(self, id: str, event: Any) -> None:
        self._waiting[id] = event
        if self._wake is not None:
            wake, self._wake = self._wake, None
            wake.callback(None)


def _no_identity(certificate: str) -> None:
    raise FailedPrecondition("this machine has no identity of which a certificate could be replaced")


class AgentService(SessionCalls, VolumeCalls, StatsCalls):
    """One method per RPC.

    :ivar keys: the key that waits for its certificate.
    :ivar rekey: puts a certificate (PEM) for it in force. :ivar gate: the way to a metadata service.
    """

    def __init__(
        self,
        reactor: Any,
        provider: IContainerProvider,
        sandbox: Sandbox,
        volumes: VolumeStore,
        *,
        execs: int = 64,
        sessions: int = 64,
        forwards: int = 256,
        own_machine: bool = True,
    ) -> None:
        SessionCalls.__init__(self, reactor, provider, sessions=sessions, forwards=forwards)
        VolumeCalls.__init__(self, reactor, volumes)
        StatsCalls.__init__(self, reactor, provider, own=own_machine)
        self._reactor = reactor
        self._provider = provider
        self._sandbox = sandbox
        self._execs = execs
        self._executing = 0
        self._watchers: set[Watcher] = set()
        self._sandbox_id = ""
        self._version = _version()
        self.boot_id = ""
        self.agent_id = secrets.token_hex(16)
        self.keys = Keys()
        self.rekey: Callable[[str], None] = _no_identity
        self.gate: MetadataGate | None = None
        provider.watch(self._changed, self._removed)

    def begin(self, sandbox_id: str, boot_id: str, *, new_agent: bool) -> None:
        """The machine has its identity. `new_agent`: it is the first one of this process."""
        self._sandbox_id = sandbox_id
        self.boot_id = boot_id
        self.begin_stats()
        if new_agent:
            self.agent_id = secrets.token_hex(16)  # made before, clones would share it

    def _changed(self, state: Any) -> None:
        for watcher in self._watchers:
            watcher.changed(state)

    def _removed(self, id: str) -> None:
        for watcher in self._watchers:
            watcher.removed(id)

    # The machine

    async def Info(self, request: Any, call: Any) -> Any:
        return messages.InfoResponse(
            version=self._version,
            container_provider=self._provider.name,
            boot_id=self.boot_id,
            agent_id=self.agent_id,
            sandbox_id=self._sandbox_id,
            memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            cpus=os.cpu_count() or 1,
            now_nanos=time.time_ns(),
        )

    async def NewKey(self, request: Any, call: Any) -> Any:
        return messages.NewKeyResponse(request=self.keys.request(self._sandbox_id))

    async def Rekey(self, request: Any, call: Any) -> Any:
        self.rekey(request.certificate)
        return messages.RekeyResponse()

    async def ConfigureSandbox(self, request: Any, call: Any) -> Any:
        self._sandbox.configure(request.config)
        if self.gate is not None:
            await self.gate.configure(request.config.annotations)
        await self._provider.configure(request.config)
        return messages.ConfigureSandboxResponse()

    async def Watch(self, request: Any, call: Any) -> AsyncIterator[Any]:
        watcher = Watcher()
        self._watchers.add(watcher)
        try:
            snapshot = {state.id: state for state in await self._provider.containers()}
            # What changed while the list was made is in one of the two, or in both.
            for id, event in watcher.take().items():
                if event.HasField("removed"):
                    snapshot.pop(id, None)
                elif id not in snapshot or _rank(event.container) >= _rank(snapshot[id]):
                    snapshot[id] = event.container
            for state in snapshot.values():
                yield messages.WatchEvent(container=state)
            yield messages.WatchEvent(synced=messages.Synced())
            while True:
                await watcher.wait()
                for event in watcher.take().values():
                    yield event
        finally:
            self._watchers.discard(watcher)

    # Containers

    async def CreateContainer(self, request: Any, call: Any) -> Any:
        config = request.config
        validate.words("config.command", config.command)
        validate.words("config.args", config.args)
        for env in config.envs:
            if not env.key or "=" in env.key or "\0" in env.key or b"\0" in env.value:
                raise InvalidArgument(f"config.envs: {env.key[:80]!r} is no name of a variable, or has a NUL")
        for mount in config.mounts:
            mount.host_path = mounted(self._volumes, mount.host_path)
        state = await self._provider.create(
            validate.container_id(request.id),
            validate.image_id(request.image_id),
            config,
            request.sandbox_config,
        )
        return messages.CreateContainerResponse(state=state)

    async def StartContainer(self, request: Any, call: Any) -> Any:
        state = await self._provider.start_container(validate.container_id(request.id))
        return messages.StartContainerResponse(state=state)

    async def StopContainer(self, request: Any, call: Any) -> Any:
        grace = validate.seconds("grace_seconds", request.grace_seconds)
        state = await self._provider.stop_container(validate.container_id(request.id), grace)
        return messages.StopContainerResponse(state=state)

    async def RemoveContainer(self, request: Any, call: Any) -> Any:
        await self._provider.remove(validate.container_id(request.id))
        return messages.RemoveContainerResponse()

    async def UpdateContainer(self, request: Any, call: Any) -> Any:
        state = await self._provider.update(validate.container_id(request.id), request.resources)
        return messages.UpdateContainerResponse(state=state)

    async def ListContainers(self, request: Any, call: Any) -> Any:
        return messages.ListContainersResponse(containers=await self._provider.containers())

    async def ExecSync(self, request: Any, call: Any) -> Any:
        id = validate.container_id(request.id)
        command = validate.command(request.command)
        timeout = validate.seconds("timeout_seconds", request.timeout_seconds)
        kept = min(request.max_output_bytes or MAX_OUTPUT_BYTES, MAX_OUTPUT_BYTES)
        if self._executing >= self._execs:
            raise ResourceExhausted(f"{self._execs} commands are being executed already; try again later")
        self._executing += 1
        try:
            result = await self._provider.exec_sync(id, command, float(timeout), kept)
        finally:
            self._executing -= 1
        return messages.ExecSyncResponse(
            stdout=result.stdout, stderr=result.stderr, exit_code=result.exit_code
        )

    async def ReadLog(self, request: Any, call: Any) -> AsyncIterator[Any]:
        id = validate.container_id(request.id)
        records = self._provider.read_log(id, validate.cursor(request.cursor), request.follow)
        try:
            async for record in records:
                yield record
        finally:
            await records.aclose()  # type: ignore[attr-defined]

    # Images

    async def MissingLayers(self, request: Any, call: Any) -> Any:
        present = await self._provider.missing_layers(validate.diff_ids(request.diff_ids))
        return messages.MissingLayersResponse(present=present)

    async def LoadImage(self, requests: AsyncIterator[Any], call: Any) -> Any:
        first = await anext(aiter(requests), None)
        if first is None or first.WhichOneof("part") != "header":
            raise InvalidArgument("LoadImage: the first message has to be the header")
        image_id = validate.image_id(first.header.image_id)
        archive = _pieces(requests)
        try:
            await self._provider.load_image(image_id, archive)
        finally:
            await archive.aclose()  # type: ignore[attr-defined]
        return messages.LoadImageResponse(image_id=image_id)

    async def FetchImage(self, request: Any, call: Any) -> Any:
        if not IImageFetcher.providedBy(self._provider):
            raise Unimplemented(
                f"the {self._provider.name} provider of this VM takes images from its node alone: an "
                "executable's URL needs a VM with the systemd provider"
            )
        if len(request.url) > validate.MAX_URL:
            raise InvalidArgument(f"url: more than {validate.MAX_URL} characters")
        await self._provider.fetch_image(validate.image_id(request.image_id), request.url)
        return messages.FetchImageResponse()

    async def ListImages(self, request: Any, call: Any) -> Any:
        return messages.ListImagesResponse(image_ids=await self._provider.images())

    async def RemoveImage(self, request: Any, call: Any) -> Any:
        await self._provider.remove_image(validate.image_id(request.image_id))
        return messages.RemoveImageResponse()


def _rank(state: Any) -> int:
    return _RANK.get(state.state, 0)


async def _pieces(requests: AsyncIterator[Any]) -> AsyncIterator[bytes]:
    async for request in requests:
        if request.WhichOneof("part") != "data":
            raise InvalidArgument("LoadImage: after the header, pieces of the archive are expected")
        if len(request.data) > MAX_PIECE_BYTES:
            raise InvalidArgument(f"LoadImage: a piece of more than {MAX_PIECE_BYTES} bytes")
        if request.data:
            yield request.data
