# SPDX-License-Identifier: Apache-2.0
"""What the node asks of a pod's VM. Behind it is the agent in the VM, or what takes its place without one.

Methods fail with the errors of `infranetes_common.errors`: `Unavailable` if the VM can't be reached or the
connection is lost during the call, `NotOffered` if it lacks the call. Cancelling a call also ends it in the
VM. What the VM sends is checked and within `agent.limits` when it is handed on.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from typing import Protocol, TypeVar

from twisted.internet.interfaces import IStreamClientEndpoint
from zope.interface import Interface

from infranetes.machines.keeping import IKeepAgent
from infranetes.machines.sessions import PortForwardCall, SessionCall
from infranetes.providers.interface import MemoryRange
from infranetes_common.filesync.manifest import Bounds, Change, Entry, Manifest
from infranetes_common.nfs import NfsMount
from infranetes_common.pod_firewall import PodFirewall
from infranetes_common.wire import cri, vmserver

CALL_SECONDS = 30.0  # a call that only asks, or has something short done
UNMOUNT_SECONDS = 60.0  # time to write pending data

_Event = TypeVar("_Event", covariant=True)


class EventStream(Protocol[_Event]):
    """A stream that the VM sends. Iterating it fails as the methods here do, or with `txgrpc.GrpcError`."""

    def __aiter__(self) -> AsyncIterator[_Event]:
        """Iterate over what is sent."""

    def cancel(self) -> None:
        """End the stream. Idempotent."""


class IVmAgent(Interface):
    """What the agent does for the VM itself."""

    async def info(within: float = CALL_SECONDS) -> vmserver.InfoResponse:
        """Ask which sandbox's agent it is. :param within: seconds."""

    async def new_key(within: float = CALL_SECONDS) -> bytes:
        """Have the VM make a new key; return the request for its certificate (PKCS #10, DER)."""

    async def rekey(certificate: str, within: float = CALL_SECONDS) -> None:
        """Use the certificate (PEM) for the new key, for all connections from then on."""

    async def attest(nonce: bytes) -> vmserver.AttestResponse:
        """Have the VM's processor report on it, and on the key of its agent's certificate.

        :param nonce: 32 to 64 bytes that were never sent before.
        :raise FailedPrecondition: the VM is not confidential, or its kernel makes no reports.
        :raise NotOffered: the VM is not a pod's alone, or its agent lacks the call."""

    def reconnect() -> None:
        """Have the next call make a new connection. Those in progress fail with Unavailable."""

    async def configure(
        config: cri.PodSandboxConfig, node_dns: cri.DNSConfig, contprovider: str = ""
    ) -> None:
        """Make the VM this pod's.

        :param node_dns: for a pod that says nothing of DNS, in a VM that has none of its own.
        :param contprovider: the ContainerProvider that is to run its containers; "": the VM's own.
        :raise FailedPrecondition: the VM does not offer that one."""

    async def warm_up() -> None:
        """Have a VM that waits for a pod run a container, so that the pod's own starts sooner. Idempotent.

        :raise FailedPrecondition: the VM has containers."""

    async def join_pod_network(request: vmserver.JoinPodNetworkRequest) -> int:
        """Give the VM an address of the pods' network. Return how long packets to it may be.

        :raise NotOffered: the VM is not a pod's alone, or its agent lacks the call."""

    async def close() -> None:
        """Close the connection. Calls under way fail with Unavailable."""


class IContainerAgent(Interface):
    """What the agent does with the containers."""

    def watch() -> EventStream[vmserver.WatchEvent]:
        """Open the Watch stream, which tells the states of all containers. Fails with GrpcError."""

    async def create(
        container_id: str, image_id: str, config: cri.ContainerConfig, sandbox: cri.PodSandboxConfig
    ) -> vmserver.ContainerState:
        """Create a container. :raise FailedPrecondition: its image is not loaded."""

    async def start(container_id: str) -> vmserver.ContainerState:
        """Start a container."""

    async def stop(
        container_id: str, grace_seconds: int, within: float = CALL_SECONDS
    ) -> vmserver.ContainerState:
        """End a container; return its state then. `within` is added to the grace period."""

    async def remove(container_id: str, within: float = CALL_SECONDS) -> None:
        """End and remove a container. Unknown: nothing to do."""

    async def update(container_id: str, resources: cri.LinuxContainerResources) -> vmserver.ContainerState:
        """Change a container's limits."""

    async def stats(within: float = CALL_SECONDS) -> vmserver.StatsResponse:
        """Ask what the VM and its containers use. :param within: seconds."""

    async def exec_sync(
        container_id: str, command: Sequence[str], seconds: int, limit: float, max_output: int
    ) -> vmserver.ExecSyncResponse:
        """Run a command to its end.

        :param seconds: after which the agent kills it; 0: never. :param limit: seconds after which this
            call gives up, if `seconds` is 0. :param max_output: bytes kept of each stream."""

    def exec() -> SessionCall:
        """Begin Exec: `send` its start, then its input. Fails with GrpcError, as the next two do."""

    def attach() -> SessionCall:
        """Begin Attach."""

    def port_forward() -> PortForwardCall:
        """Begin PortForward: `send` its port, then its bytes."""

    def read_log(container_id: str, cursor: str, follow: bool) -> AsyncGenerator[vmserver.LogRecord, None]:
        """Read a container's log after `cursor`, as `text` if the agent can. `aclose()` ends the call."""


class IImageAgent(Interface):
    """How containers' images come to the agent."""

    async def images() -> set[str]:
        """List the ids of the images that are loaded."""

    async def missing_layers(diff_ids: Sequence[str]) -> int:
        """Ask how many of these layers, lowest first, the VM has already."""

    async def load_image(image_id: str, archive: AsyncIterator[bytes]) -> None:
        """Load an image from an archive, which is closed in the end, also when that fails."""

    async def fetch_image(image_id: str, url: str) -> None:
        """Have the VM fetch an image. :raise NotOffered: it takes images from the node alone."""

    async def remove_image(image_id: str) -> None:
        """Remove an image. Unknown: nothing to do. :raise FailedPrecondition: a container uses it."""


class IClockAgent(Interface):
    """The correction of the VM's clock."""

    async def correct_clock(steady: int, earliest: int, latest: int) -> None:
        """Tell the agent the time when the VM's steady clock was `steady`, to correct its other clock.

        Idempotent.

        :param steady: the steady clock's nanoseconds, as `info` returned them.
        :param earliest: the node's time before that `info` call, in nanoseconds since 1970 UTC.
        :param latest: the node's time after it.
        :raise FailedPrecondition: the reading is too old, or the VM's kernel refuses.
        :raise NotOffered: the agent does not have the VM to itself, or lacks the call.
        """


class ISizeAgent(Interface):
    """What the guest does when its VM becomes smaller, or larger again."""

    async def release_memory(ranges: Sequence[MemoryRange], seconds: float) -> None:
        """Have the guest take memory out of use, all or none.

        Memory that is still there after `seconds` is used again.

        :raise FailedPrecondition: processes need the memory, or the guest can't move its contents.
        :raise DeadlineExceeded: it takes longer than `seconds`.
        :raise NotOffered: the agent does not have the VM to itself, or lacks the call.
        """

    async def restore_memory(ranges: Sequence[MemoryRange]) -> None:
        """Have the guest use memory again. Idempotent. Raises as `release_memory` does."""

    async def use_processors(count: int) -> None:
        """Have the guest use `count` processors, or all if it has fewer. Idempotent.

        :raise FailedPrecondition: the guest can't do that.
        :raise NotOffered: as `release_memory`.
        """


class ILayerAgent(Interface):
    """Images that are made of layers.

    All calls raise NotOffered if the VM takes only whole images (`IImageAgent.load_image`).
    """

    async def layers(diff_ids: Sequence[str]) -> list[vmserver.LayerState]:
        """Ask how much of each layer the VM has; return one state for each, in the same order.

        :raise InvalidArgument: the agent answers for other layers, or with an invalid digest.
        """

    async def mount_layers(disks: Sequence[vmserver.LayerDisk]) -> None:
        """Mount layers that the hypervisor shows as disks.

        :raise Unavailable: a disk does not appear in the VM.
        :raise FailedPrecondition: a disk does not hold a layer.
        """

    async def put_layer(header: vmserver.PutLayerHeader, data: AsyncIterator[bytes]) -> None:
        """Send a layer to the VM. `data` begins at the header's offset, and is closed in the end.

        :raise OutOfRange: the VM has less than the offset: ask `layers`, and begin there or at 0.
        :raise DataLoss: the data does not match the header; the VM has deleted it.
        :raise ResourceExhausted: the VM's disk is full; the VM has deleted what had arrived.
        :raise Unavailable: the connection is lost (the VM keeps what has arrived), or a newer call took over.
        """

    async def remove_layers(diff_ids: Sequence[str]) -> None:
        """Have the VM remove these layers and all others that it has, except those that its images need."""

    async def add_image(
        image_id: str, configuration: bytes, disks: Sequence[vmserver.LayerDisk] = ()
    ) -> None:
        """Make an image from layers that the VM has and from `disks`, which are mounted first.

        :raise Unavailable: a disk does not appear in the VM.
        :raise FailedPrecondition: the VM lacks a layer, or a disk does not hold one.
        :raise DataLoss: a layer was damaged, and is deleted.
        """


class IServiceAgent(Interface):
    """The VM's service proxy."""

    def service_rules(
        updates: AsyncIterator[vmserver.ServiceRulesUpdate],
    ) -> AsyncGenerator[vmserver.ServiceRulesState, None]:
        """Send updates; yield the state in force when the call begins and after each update.

        :raise NotOffered: the VM has no service proxy.
        :raise Unavailable: its tables can't be changed, a newer call took over, or the connection is lost.
        """

    async def service_report(
        key: vmserver.ServiceKey | None, within: float
    ) -> vmserver.ServiceReportResponse:
        """Ask for the state of the VM's service proxy.

        :param key: a destination; the report then has the proxy's verdict on connections to it.

        :raise NotOffered: the VM has no service proxy.
        """


class IFirewallAgent(Interface):
    """The firewall in the VM."""

    async def set_firewall(firewall: PodFirewall, tunnel_port: int = 0) -> None:
        """Put a firewall in force in the VM. Idempotent.

        :param tunnel_port: the port of the tunnel to the node, which filters its traffic; 0: no tunnel.
        :raise NotOffered: the agent does not have the VM to itself, or lacks the call.
        :raise Unavailable: the firewall is not in force; the former one still is.
        """


class IVolumeAgent(Interface):
    """Volumes that are carried into the VM."""

    async def put_volume(
        id: str,
        *,
        file: bool,
        in_memory: bool,
        bounds: Bounds,
        changes: AsyncIterator[Change],
        size_limit: int = 0,
        huge_page_size: int = 0,
    ) -> None:
        """Make the volume if it does not exist, and apply `changes` in their order.

        :param size_limit: the bytes that a directory in memory may take; 0: no limit.
        :param huge_page_size: the bytes of the huge pages that hold its files; 0: ordinary pages."""

    async def list_volume(id: str, bounds: Bounds) -> Manifest:
        """Return everything in a volume, by path.

        :raise NotFound: there is no such volume. :raise ResourceExhausted: it exceeds `bounds`."""

    def read_volume(id: str, entries: Iterable[Entry]) -> AsyncGenerator[Change, None]:
        """Yield these entries with their content.

        :raise InvalidArgument: the agent sends something else."""

    def watch_volumes(ids: Sequence[str], bounds: Bounds) -> AsyncGenerator[str, None]:
        """Yield each id once, then whenever something in that volume has changed.

        `aclose()` ends the call."""

    async def remove_volume(id: str) -> None:
        """Remove a volume. Does nothing if it is unknown."""

    async def measure_volumes(ids: Sequence[str]) -> dict[str, int]:
        """Return the bytes that volumes take on the VM's disk, by id, without those not measured yet."""


class IDiskAgent(Interface):
    """Volumes that are disks of the VM."""

    async def mount_disk(
        serial: str,
        filesystem: str,
        options: Iterable[str] = (),
        *,
        read_only: bool = False,
        group: int | None = None,
    ) -> None:
        """Mount a disk, making a file system on it if it is blank. Idempotent.

        :param group: the id of the group that its files are given to; None: they keep theirs.
        :raise FailedPrecondition: the disk holds something else.
        :raise NotOffered: the VM is not a pod's alone, or its agent lacks the call."""

    async def find_disk(serial: str) -> str:
        """Wait for a disk that will not be mounted; return the path of its device in the VM. Idempotent.

        :raise FailedPrecondition: the disk is mounted. :raise NotOffered: as `mount_disk`."""

    async def sync_disk(serial: str) -> None:
        """Flush pending writes to a disk, which stays in use. Idempotent.

        :raise NotFound: the disk is neither mounted nor a container's."""

    async def unmount_disk(serial: str, within: float = UNMOUNT_SECONDS) -> None:
        """Flush pending writes to a disk and unmount it. Idempotent.

        :raise FailedPrecondition: something uses the disk; the pending writes are on it."""

    async def disk_usage(serial: str, *, grow: bool = False) -> vmserver.DiskUsageResponse:
        """Measure a disk. :param grow: grow its file system first.

        :raise NotFound: the disk is not mounted."""


class INfsAgent(Interface):
    """Volumes that NFS servers export."""

    async def mount_nfs(container_id: str, mount: NfsMount) -> str:
        """Mount an export for a container that is created next; return the volume's id. Idempotent.

        :raise DeadlineExceeded: the server does not answer.
        :raise FailedPrecondition: the server can't be reached or refuses, or the VM's kernel can't mount it.
        :raise NotOffered: the VM is not a pod's alone, or its agent lacks the call."""

    async def unmount_nfs(within: int) -> None:
        """Flush pending writes and unmount all exports. Idempotent.

        :param within: how many seconds the agent waits for servers.
        :raise DeadlineExceeded: a server did not take the pending writes in time.
        :raise FailedPrecondition: they could not be flushed for another reason."""


class IShellAgent(Interface):
    """A shell in the VM, outside of every container."""

    def shell() -> SessionCall:
        """Begin Shell: `send` its start, then its input, and read `shell_output`. It fails with GrpcError."""

    def shell_output(call: SessionCall) -> AsyncGenerator[vmserver.SessionOutput, None]:
        """Read a shell's output, and its exit code, 0 to 255, as the last. The call ends with this generator.

        :raise NotOffered: the agent has no shell."""


class IAgent(
    IVmAgent,
    IContainerAgent,
    IImageAgent,
    IClockAgent,
    ISizeAgent,
    ILayerAgent,
    IServiceAgent,
    IFirewallAgent,
    IVolumeAgent,
    IDiskAgent,
    INfsAgent,
    IShellAgent,
    IKeepAgent,
):
    """All that the node asks of one VM. Connects when it is first used, and again after a loss."""


class Connect(Protocol):
    """Makes clients of VMs' agents."""

    def __call__(
        self, sandbox_id: str, host: str, port: int, endpoint: IStreamClientEndpoint | None = None
    ) -> IAgent:
        """Make a client of a VM's agent, which is not yet connected.

        :param endpoint: leads to the agent alone, in place of TLS to `host` and `port` (`IReachesAgents`)."""
