# SPDX-License-Identifier: Apache-2.0
"""The client of one VM's agent: its calls with deadlines, its answers checked."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import TypeVar

from twisted.internet.defer import Deferred
from twisted.internet.endpoints import wrapClientTLS
from twisted.internet.interfaces import IStreamClientEndpoint
from zope.interface import implementer

from infranetes.identity.authority import Authority, KnownKey
from infranetes.machines.agent import checks, limits
from infranetes.machines.agent.calls import CHUNK_BYTES, PortForwardStream, SessionStream, closing
from infranetes.machines.agent.clock import ClockClient
from infranetes.machines.agent.disks import DiskClient
from infranetes.machines.agent.firewall import FirewallClient
from infranetes.machines.agent.keeping import KeepClient
from infranetes.machines.agent.layers import LayerClient
from infranetes.machines.agent.marked import marked_endpoint
from infranetes.machines.agent.nfs import NfsClient
from infranetes.machines.agent.screen import AgentScreen
from infranetes.machines.agent.services import ServiceClient
from infranetes.machines.agent.shell import ShellClient
from infranetes.machines.agent.size import SizeClient
from infranetes.machines.agent.volumes import VolumeClient
from infranetes.machines.interface import CALL_SECONDS, Connect, IAgent
from infranetes.machines.sleeping import SleepGate
from infranetes.tracing.agent_calls import observe
from infranetes_common.errors import InvalidArgument
from infranetes_common.reactors import IReactor
from infranetes_common.wire import cri, vmserver
from txgrpc import Channel, GrpcError
from txgrpc.channel import Backoff
from txgrpc.observer import Observer

CONNECT_SECONDS = 10.0
ASLEEP_SECONDS = 1e9  # a connection to a VM that sleeps waits for it; endpoints have deadlines of their own
#: Each pause is over before whoever waits for an agent that starts (`PodMachine`) asks again.
RECONNECT = Backoff(first=0.02, factor=1.2, most=1.5)
KEEPALIVE_SECONDS = 20.0
ATTEST_SECONDS = 60.0  # a processor that many VMs ask has them wait
ENGINE_SECONDS = 120.0  # an engine that is started for the pod; the agent gives up a little earlier
LOAD_SECONDS = 900.0  # an image of several GB through a slow link
EXEC_MARGIN_SECONDS = 10.0  # added to the command's own time, for the agent to kill it and to answer


_WithState = TypeVar(
    "_WithState",
    vmserver.CreateContainerResponse,
    vmserver.StartContainerResponse,
    vmserver.StopContainerResponse,
    vmserver.UpdateContainerResponse,
)


_Streams = TypeVar("_Streams", SessionStream, PortForwardStream)


def _ahead(call: _Streams) -> _Streams:
    call.receive_ahead(limits.STREAM_AHEAD_BYTES)
    return call


@implementer(IAgent)
class AgentClient(
    VolumeClient,
    DiskClient,
    NfsClient,
    LayerClient,
    ServiceClient,
    FirewallClient,
    SizeClient,
    ClockClient,
    ShellClient,
    KeepClient,
):
    """The client of the agent in one sandbox's VM."""

    async def info(self, within: float = CALL_SECONDS) -> vmserver.InfoResponse:
        return checks.clamped(await self._call(self._stub.Info(vmserver.InfoRequest(), timeout=within)))

    async def new_key(self, within: float = CALL_SECONDS) -> bytes:
        answer = await self._call(self._stub.NewKey(vmserver.NewKeyRequest(), timeout=within))
        return answer.request

    async def rekey(self, certificate: str, within: float = CALL_SECONDS) -> None:
        await self._call(self._stub.Rekey(vmserver.RekeyRequest(certificate=certificate), timeout=within))

    async def attest(self, nonce: bytes) -> vmserver.AttestResponse:
        request = vmserver.AttestRequest(nonce=nonce)
        return await self._call(self._stub.Attest(request, timeout=ATTEST_SECONDS))

    def reconnect(self) -> None:
        self._channel.reconnect()

    async def configure(
        self, config: cri.PodSandboxConfig, node_dns: cri.DNSConfig, contprovider: str = ""
    ) -> None:
        request = vmserver.ConfigureSandboxRequest(
            config=config, node_dns=node_dns, container_provider=contprovider
        )
        seconds = ENGINE_SECONDS if contprovider else CALL_SECONDS
        await self._call(self._stub.ConfigureSandbox(request, timeout=seconds))

    async def warm_up(self) -> None:
        await self._call(self._stub.WarmUp(vmserver.WarmUpRequest(), timeout=ENGINE_SECONDS))

    async def join_pod_network(self, request: vmserver.JoinPodNetworkRequest) -> int:
        answer = await self._call(self._stub.JoinPodNetwork(request, timeout=ENGINE_SECONDS))
        return min(answer.mtu, request.mtu)

    def watch(self) -> checks.CheckedStream[vmserver.WatchEvent]:
        return checks.CheckedStream(
            self._stub.Watch(vmserver.WatchRequest(), timeout=None), checks.checked_event
        )

    async def create(
        self, container_id: str, image_id: str, config: cri.ContainerConfig, sandbox: cri.PodSandboxConfig
    ) -> vmserver.ContainerState:
        request = vmserver.CreateContainerRequest(
            id=container_id, image_id=image_id, config=config, sandbox_config=sandbox
        )
        return await self._state(container_id, self._stub.CreateContainer(request, timeout=120.0))

    async def start(self, container_id: str) -> vmserver.ContainerState:
        request = vmserver.StartContainerRequest(id=container_id)
        return await self._state(container_id, self._stub.StartContainer(request, timeout=120.0))

    async def stop(
        self, container_id: str, grace_seconds: int, within: float = CALL_SECONDS
    ) -> vmserver.ContainerState:
        request = vmserver.StopContainerRequest(id=container_id, grace_seconds=grace_seconds)
        stopping = self._stub.StopContainer(request, timeout=grace_seconds + within)
        return await self._state(container_id, stopping)

    async def remove(self, container_id: str, within: float = CALL_SECONDS) -> None:
        request = vmserver.RemoveContainerRequest(id=container_id)
        await self._call(self._stub.RemoveContainer(request, timeout=within))

    async def update(
        self, container_id: str, resources: cri.LinuxContainerResources
    ) -> vmserver.ContainerState:
        request = vmserver.UpdateContainerRequest(id=container_id, resources=resources)
        return await self._state(container_id, self._stub.UpdateContainer(request, timeout=CALL_SECONDS))

    async def stats(self, within: float = CALL_SECONDS) -> vmserver.StatsResponse:
        answer = await self._call(self._stub.Stats(vmserver.StatsRequest(), timeout=within))
        return await checks.checked_stats(answer, self._channel.turns)

    async def exec_sync(
        self, container_id: str, command: Sequence[str], seconds: int, limit: float, max_output: int
    ) -> vmserver.ExecSyncResponse:
        request = vmserver.ExecSyncRequest(
            id=container_id, command=command, timeout_seconds=seconds, max_output_bytes=max_output
        )
        deadline = seconds + EXEC_MARGIN_SECONDS if seconds else limit
        answer = await self._call(self._stub.ExecSync(request, timeout=deadline))
        await self._turn()  # decoding an answer of many MiB takes a whole turn
        return checks.checked_output(answer, max_output)

    def exec(self) -> SessionStream:
        return _ahead(self._stub.Exec(timeout=None))

    def attach(self) -> SessionStream:
        return _ahead(self._stub.Attach(timeout=None))

    def port_forward(self) -> PortForwardStream:
        return _ahead(self._stub.PortForward(timeout=None))

    async def read_log(
        self, container_id: str, cursor: str, follow: bool
    ) -> AsyncGenerator[vmserver.LogRecord, None]:
        request = vmserver.ReadLogRequest(id=container_id, cursor=cursor, follow=follow, text=True)
        stream = self._stub.ReadLog(request, timeout=None)
        records = checks.CheckedRecords(container_id)
        try:
            async for record in stream:
                yield records.checked(record)
        except GrpcError as error:
            raise self._as_error(error) from None
        finally:
            stream.cancel()

    async def images(self) -> set[str]:
        answer = await self._call(self._stub.ListImages(vmserver.ListImagesRequest(), timeout=CALL_SECONDS))
        return set(answer.image_ids)

    async def missing_layers(self, diff_ids: Sequence[str]) -> int:
        request = vmserver.MissingLayersRequest(diff_ids=diff_ids)
        answer = await self._call(self._stub.MissingLayers(request, timeout=CALL_SECONDS))
        return min(answer.present, len(diff_ids))

    async def load_image(self, image_id: str, archive: AsyncIterator[bytes]) -> None:
        async with closing(archive):
            await self._call(self._stub.LoadImage(_load_requests(image_id, archive), timeout=LOAD_SECONDS))

    async def fetch_image(self, image_id: str, url: str) -> None:
        request = vmserver.FetchImageRequest(image_id=image_id, url=url)
        await self._call(self._stub.FetchImage(request, timeout=LOAD_SECONDS))

    async def remove_image(self, image_id: str) -> None:
        request = vmserver.RemoveImageRequest(image_id=image_id)
        await self._call(self._stub.RemoveImage(request, timeout=CALL_SECONDS))

    async def close(self) -> None:
        await self._channel.close()

    async def _state(self, container_id: str, call: Deferred[_WithState]) -> vmserver.ContainerState:
        return checks.checked_state(container_id, (await self._call(call)).state)


async def _load_requests(
    image_id: str, archive: AsyncIterator[bytes]
) -> AsyncIterator[vmserver.LoadImageRequest]:
    yield vmserver.LoadImageRequest(header=vmserver.LoadImageHeader(image_id=image_id))
    async for data in archive:
        for at in range(0, len(data), CHUNK_BYTES):
            yield vmserver.LoadImageRequest(data=data[at : at + CHUNK_BYTES])


def connector(
    reactor: IReactor,
    authority: Authority,
    known_key: Callable[[str], KnownKey] = lambda _: KnownKey(),
    gate: SleepGate | None = None,
) -> Connect:
    """Make clients that speak with the VM of their sandbox alone, by mutual TLS if it is not by an endpoint.

    :param known_key: the key that a sandbox's VM was last given a certificate for.
    :param gate: where calls to VMs that sleep wait; None: none sleep."""

    def by_tls(sandbox_id: str, host: str, port: int) -> IStreamClientEndpoint:
        if not host or not 0 < port < 65536:
            raise InvalidArgument(f"sandbox {sandbox_id}: its provider gave no address for the agent")
        return wrapClientTLS(
            authority.client_options(sandbox_id, lambda: known_key(sandbox_id)),
            marked_endpoint(reactor, host, port, CONNECT_SECONDS),
        )

    def connect(
        sandbox_id: str, host: str, port: int, endpoint: IStreamClientEndpoint | None = None
    ) -> AgentClient:
        endpoint = endpoint or by_tls(sandbox_id, host, port)
        observer: Observer = observe
        seconds = CONNECT_SECONDS * 2
        if gate is not None:
            endpoint, observer = gate.endpoint(sandbox_id, endpoint), gate.observer(sandbox_id, observe)
            seconds = ASLEEP_SECONDS
        channel = Channel(
            reactor,
            endpoint,
            connect_timeout=seconds,
            limits=limits.CHANNEL,
            keepalive=KEEPALIVE_SECONDS,
            backoff=RECONNECT,
            screen=AgentScreen(),
            observer=observer,
        )
        return AgentClient(sandbox_id, channel)

    return connect
