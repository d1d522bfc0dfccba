"""The client of one VM's agent: its calls with deadlines, its failures as our errors."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from twisted.internet.endpoints import HostnameEndpoint, wrapClientTLS

from infranetes.agent.volumes import VolumeClient
from infranetes_common import cri, vmserver
from infranetes_common.errors import InfranetesError, InvalidArgument, Unavailable, from_grpc
from txgrpc import Channel, Code, GrpcError

CONNECT_SECONDS = 10.0
KEEPALIVE_SECONDS = 20.0
CALL_SECONDS = 30.0  # a call that only asks the agent, or has it do something short
LOAD_SECONDS = 900.0  # an image of several GB through a slow link
PIECE_BYTES = 256 * 1024
EXEC_MARGIN_SECONDS = 10.0  # what the agent gets over the command's own time to kill it and to answer


class AgentClient(VolumeClient):
    """Calls to the agent of one sandbox. Connects when first used, and again after a loss.

    Each method fails with one of `infranetes_common.errors`; `Unavailable` when the agent can't be
    reached or the connection is lost in the middle. Cancelling a call ends it at the agent too.
    """

    def __init__(self, sandbox_id: str, channel: Any) -> None:
        self._sandbox_id = sandbox_id
        self._channel = channel
        self._stub = channel.stub(vmserver.Agent)

    async def info(self, within: float = CALL_SECONDS) -> vmserver.InfoResponse:
        """Who is there. :param within: seconds."""
        answer: vmserver.InfoResponse = await self._call(
            self._stub.Info(vmserver.InfoRequest(), timeout=within)
        )
        return answer

    async def new_key(self, within: float = CALL_SECONDS) -> bytes:
        """Have the machine make itself a key: the request for its certificate."""
        answer = await self._call(self._stub.NewKey(vmserver.NewKeyRequest(), timeout=within))
        return bytes(answer.request)

    async def rekey(self, certificate: str, within: float = CALL_SECONDS) -> None:
        """Put the certificate (PEM) for that key in force, for connections from then on."""
        await self._call(self._stub.Rekey(vmserver.RekeyRequest(certificate=certificate), timeout=within))

    async def configure(self, config: cri.PodSandboxConfig, within: float = CALL_SECONDS) -> None:
        """Make the machine this pod's."""
        request = vmserver.ConfigureSandboxRequest(config=config)
        await self._call(self._stub.ConfigureSandbox(request, timeout=within))

    def watch(self) -> Any:
        """The Watch stream: an async iterator of WatchEvents with `cancel()`. Fails with GrpcError."""
        return self._stub.Watch(vmserver.WatchRequest(), timeout=None)

    async def create(
        self, container_id: str, image_id: str, config: cri.ContainerConfig, sandbox: cri.PodSandboxConfig
    ) -> vmserver.ContainerState:
        """Make a container. :raise FailedPrecondition: its image is not loaded."""
        request = vmserver.CreateContainerRequest(
            id=container_id, image_id=image_id, config=config, sandbox_config=sandbox
        )
        return await self._state(self._stub.CreateContainer(request, timeout=120.0))

    async def start(self, container_id: str) -> vmserver.ContainerState:
        """Run it."""
        request = vmserver.StartContainerRequest(id=container_id)
        return await self._state(self._stub.StartContainer(request, timeout=120.0))

    async def stop(
        self, container_id: str, grace_seconds: int, within: float = CALL_SECONDS
    ) -> vmserver.ContainerState:
        """End it: its state once it has ended. `within` comes on top of the grace."""
        request = vmserver.StopContainerRequest(id=container_id, grace_seconds=grace_seconds)
        return await self._state(self._stub.StopContainer(request, timeout=grace_seconds + within))

    async def remove(self, container_id: str, within: float = CALL_SECONDS) -> None:
        """End and forget it. Unknown: nothing to do."""
        request = vmserver.RemoveContainerRequest(id=container_id)
        await self._call(self._stub.RemoveContainer(request, timeout=within))

    async def update(
        self, container_id: str, resources: cri.LinuxContainerResources
    ) -> vmserver.ContainerState:
        """Put limits in force."""
        request = vmserver.UpdateContainerRequest(id=container_id, resources=resources)
        return await self._state(self._stub.UpdateContainer(request, timeout=CALL_SECONDS))

    async def stats(self, within: float = CALL_SECONDS) -> vmserver.StatsResponse:
        """What the machine and its containers use. :param within: seconds."""
        answer: vmserver.StatsResponse = await self._call(
            self._stub.Stats(vmserver.StatsRequest(), timeout=within)
        )
        return answer

    async def exec_sync(
        self, container_id: str, command: Sequence[str], seconds: int, limit: float, max_output: int
    ) -> vmserver.ExecSyncResponse:
        """Run a command to its end.

        :param seconds: when the agent kills it; 0: never. :param limit: when this call gives up where
            `seconds` is 0. :param max_output: bytes kept of each stream."""
        request = vmserver.ExecSyncRequest(
            id=container_id, command=command, timeout_seconds=seconds, max_output_bytes=max_output
        )
        deadline = seconds + EXEC_MARGIN_SECONDS if seconds else limit
        answer: vmserver.ExecSyncResponse = await self._call(self._stub.ExecSync(request, timeout=deadline))
        return answer

    def exec(self) -> Any:
        """The Exec call: `send` its start, then its input. Fails with GrpcError, as the next two do."""
        return self._stub.Exec(timeout=None)

    def attach(self) -> Any:
        """The Attach call."""
        return self._stub.Attach(timeout=None)

    def port_forward(self) -> Any:
        """The PortForward call: `send` its port, then its bytes."""
        return self._stub.PortForward(timeout=None)

    async def read_log(self, container_id: str, cursor: str, follow: bool) -> AsyncIterator[Any]:
        """A container's LogRecords after `cursor`. `aclose()` ends the call."""
        request = vmserver.ReadLogRequest(id=container_id, cursor=cursor, follow=follow)
        stream = self._stub.ReadLog(request, timeout=None)
        try:
            async for record in stream:
                yield record
        except GrpcError as error:
            raise self._as_error(error) from None
        finally:
            stream.cancel()

    async def images(self) -> set[str]:
        """Ids of the images that are loaded."""
        answer = await self._call(self._stub.ListImages(vmserver.ListImagesRequest(), timeout=CALL_SECONDS))
        return set(answer.image_ids)

    async def missing_layers(self, diff_ids: Sequence[str]) -> int:
        """How many of these layers, lowest first, are there already."""
        request = vmserver.MissingLayersRequest(diff_ids=diff_ids)
        return int((await self._call(self._stub.MissingLayers(request, timeout=CALL_SECONDS))).present)

    async def load_image(self, image_id: str, archive: AsyncIterator[bytes]) -> None:
        """Stream an archive in. It is closed in the end, also when that fails."""
        try:
            await self._call(self._stub.LoadImage(_pieces(image_id, archive), timeout=LOAD_SECONDS))
        finally:
            close = getattr(archive, "aclose", None)
            if close is not None:
                await close()

    async def fetch_image(self, image_id: str, url: str) -> None:
        """Have the machine fetch an image itself. :raise Unimplemented: it takes images from here alone."""
        request = vmserver.FetchImageRequest(image_id=image_id, url=url)
        await self._call(self._stub.FetchImage(request, timeout=LOAD_SECONDS))

    async def close(self) -> None:
        """Let go of the connection. Calls under way fail with Unavailable."""
        await self._channel.close()

    async def _state(self, call: Any) -> vmserver.ContainerState:
        state: vmserver.ContainerState = (await self._call(call)).state
        return state

    async def _call(self, call: Any) -> Any:
        try:
            return await call
        except GrpcError as error:
            raise self._as_error(error) from None

    def _as_error(self, error: GrpcError) -> InfranetesError:
        if error.code in (Code.UNAVAILABLE, Code.CANCELLED):
            return Unavailable(f"the agent of sandbox {self._sandbox_id} can't be reached: {error.message}")
        if error.code is Code.UNKNOWN:
            return InfranetesError(f"the agent of sandbox {self._sandbox_id} failed: {error.message}")
        return from_grpc(error)


async def _pieces(image_id: str, archive: AsyncIterator[bytes]) -> AsyncIterator[Any]:
    yield vmserver.LoadImageRequest(header=vmserver.LoadImageHeader(image_id=image_id))
    async for data in archive:
        for at in range(0, len(data), PIECE_BYTES):
            yield vmserver.LoadImageRequest(data=data[at : at + PIECE_BYTES])


Connect = Callable[[str, str, int], AgentClient]
"""`connect(sandbox_id, host, port)`: a client, not yet connected."""


def connector(reactor: Any, authority: Any, known_key: Callable[[str], str] = lambda _: "") -> Connect:
    """Makes clients that speak mutual TLS and accept that sandbox's VM alone.

    :param known_key: the key (`authority.key_id`) that a sandbox's VM was last given a certificate for."""

    def connect(sandbox_id: str, host: str, port: int) -> AgentClient:
        if not host or not 0 < port < 65536:
            raise InvalidArgument(f"sandbox {sandbox_id}: its provider gave no address for the agent")
        endpoint = wrapClientTLS(
            authority.client_options(sandbox_id, lambda: known_key(sandbox_id)),
            HostnameEndpoint(reactor, host.encode(), port, timeout=CONNECT_SECONDS),
        )
        return AgentClient(sandbox_id, Channel(reactor, endpoint, keepalive=KEEPALIVE_SECONDS))

    return connect
