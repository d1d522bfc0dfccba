"""What a PodProvider is: the one thing that makes, finds and destroys VMs."""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import attrs
from twisted.internet.defer import Deferred
from zope.interface import Attribute, Interface

from infranetes.images.preload import Preload
from infranetes_common.identity import Identity


class InstanceState(enum.Enum):
    """What the IaaS says of a VM. Transitions only go down this list, from any state to any later one."""

    PENDING = "pending"  # asked for; may have no address yet
    RUNNING = "running"  # executing, with an address; its agent may still be starting
    ENDED = "ended"  # no longer executing; disks and records may remain until destroyed


@attrs.frozen
class Size:
    """What a VM must have at least."""

    cpu_millis: int = 0  # thousandths of a core; 0: the provider's default
    memory_bytes: int = 0  # for the pod itself, the guest's own need comes on top; 0: default


@attrs.frozen
class InstanceSpec:
    """A VM to be made. `token` is its idempotency key, recorded by the caller before the call."""

    token: str  # [0-9a-f]{32}
    sandbox_id: str  # the sandbox that the VM is, or will be once it is taken from the pool
    cluster: str
    node: str
    identity: Identity  # without network: the provider adds what its network gives
    size: Size = Size()
    annotations: Mapping[str, str] = attrs.field(factory=dict)
    image: str = ""  # the catalogue's own name of the image to boot; "": what the provider makes pods of


@attrs.frozen
class Instance:
    """A VM as the IaaS knows it."""

    id: str  # the provider's own name of it
    token: str
    sandbox_id: str
    state: InstanceState
    address: str = ""  # the pod's IP; "" until there is one
    agent_host: str = ""  # where the node reaches its agent; mostly the address
    agent_port: int = 0
    created_at: float = 0.0  # seconds since 1970 UTC
    detail: str = ""  # why it is as it is, for people: an exit reason, the console's last line
    size: str = ""  # what it has, in the provider's words, such as an instance type; "": it does not tell
    cost_per_hour: float | None = None  # US dollars; None: the provider does not tell


Progress = Callable[[str], None]


@attrs.frozen
class ProviderContext:
    """Where a provider lives and for whom; given to it when it is made (see `registry`)."""

    state_dir: Path  # the daemon's, kept over reboots; a provider uses the subdirectory of its own name
    run_dir: Path  # the daemon's, gone after a reboot: sockets, pid files; again a subdirectory
    cluster: str
    node: str
    # Images that VMs shall have from the start, as one file; None: there are none. Asked for at `start`.
    preload: Callable[[Progress], Awaitable[Preload | None]] | None = None


class IHasCatalogue(Interface):
    """A provider whose IaaS has images of whole machines; `imgprovider` of the same name means them."""

    catalogue = Attribute("Finds them, once the provider has started (IImageCatalogue)")


class IPodProvider(Interface):
    """Makes VMs that become pods.

    All methods return Deferreds and never block the reactor. Every failure is one of
    `infranetes_common.errors`; `Unavailable` is the only one that is worth trying again unchanged.
    Calls for different tokens go on side by side; two for one token are one at a time, in order.
    Nothing here knows of containers. A provider keeps whatever it must know of a VM where that
    survives the daemon (tags in the IaaS, files on the node), not in memory alone.
    """

    name = Attribute("The name in the configuration: `qemu`, `simulated`, ... (str)")

    def start(progress: Progress) -> Deferred[None]:
        """Make ready to launch: templates, networks, credentials. Called once, before all else but
        `configure_network`; finds again every VM that an earlier daemon launched, and touches none.
        `progress` is told, in words for people, what a long step is doing.

        :raise FailedPrecondition: something is missing that a person has to give; says what."""

    def stop() -> Deferred[None]:
        """Let go of sockets, threads and timers. VMs go on. Twice is once."""

    def configure_network(pod_cidr: str) -> Deferred[None]:
        """The subnet that pods get addresses from, as UpdateRuntimeConfig brings it. Before or after
        `start`; the same again changes nothing. VMs keep the addresses that they have.

        :raise InvalidArgument: not a subnet this provider can serve.
        :raise FailedPrecondition: another subnet is in use by running VMs."""

    def launch(spec: InstanceSpec) -> Deferred[Instance]:
        """Ask for a VM; answers as soon as the IaaS has taken the request, PENDING or RUNNING.

        Idempotent by `spec.token`: the second call answers with the first one's VM, also after a
        restart of the daemon and also while the first is still under way. When it fails nothing of
        the VM remains: no process, address, disk or interface. Killed in the middle, `list` shows
        what there is of it, and `destroy` ends it.

        :raise ResourceExhausted: no address, capacity or quota left.
        :raise InvalidArgument: a size or annotation that this provider can't serve."""

    def wait_running(instance_id: str, timeout: float) -> Deferred[Instance]:
        """The instance once it is RUNNING with its address, its identity handed over.

        :param timeout: seconds.
        :raise DeadlineExceeded: not within that time; the VM is left as it is.
        :raise NotFound: no such VM.
        :raise Unavailable: it ended meanwhile; the message has the reason and the console's tail."""

    def get(instance_id: str) -> Deferred[Instance]:
        """The instance now. :raise NotFound: no such VM, or it is destroyed."""

    def list() -> Deferred[list[Instance]]:
        """Every VM of this cluster and node that has not been destroyed, ENDED ones too, and also
        those that no record of ours knows. Never another node's."""

    def destroy(instance_id: str) -> Deferred[None]:
        """End the VM and give back all it holds: address, disk, interface. Answers when that is so.
        Unknown or destroyed already: nothing to do, no error."""

    def watch(ended: Callable[[Instance], None]) -> None:
        """From now on call `ended` with each VM that is found to be no longer executing without
        `destroy` having been asked for, in the reactor's thread, once per VM."""

    def status() -> Mapping[str, str]:
        """What Status(verbose) shows of this provider; keys and values for people."""
