# SPDX-License-Identifier: Apache-2.0
"""`IPodProvider`, the interface between the daemon and an IaaS: it makes, finds and destroys VMs.

To write a provider, implement `IPodProvider`, offer a factory for it as an entry point (see `registry`), and
run the contract suite of `tests.contract.pod_provider` over it.
"""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IStreamClientEndpoint
from zope.interface import Attribute, Interface

from infranetes.observer import NULL_OBSERVER, Observer
from infranetes_common.errors import Unavailable
from infranetes_common.identity import Identity

if TYPE_CHECKING:
    from infranetes.images.interface import IImageCatalogue
    from infranetes.images.preload import Preload
    from infranetes.providers.address_ranges import AddressRanges
    from infranetes.providers.machine_images import GuestBoot, ImageBoot
    from infranetes_common.pod_firewall import PodFirewall


class Awaited(Unavailable):
    """A provider's start waits for work in progress; the message says how far that has come. Try again
    soon."""


class InstanceState(enum.Enum):
    """The state of a VM in the IaaS. A VM only ever moves down this list; it may skip states. A STOPPED one
    that is started begins anew."""

    PENDING = "pending"  # asked for; may have no address yet
    RUNNING = "running"  # executes and has an address; its agent may still be starting
    STOPPED = "stopped"  # the provider has stopped it, and can start it again; see `stopping.IStopsVms`
    ENDED = "ended"  # executes no longer; disks and records may remain until it is destroyed


@attrs.frozen
class Size:
    """The least resources that a VM must have."""

    cpu_millis: int = 0  # thousandths of a core; 0: the provider's default
    memory_bytes: int = 0  # for the pod, without the guest system's own need; 0: the provider's default
    overhead_bytes: int = 0  # counted for the pod on top of that, for whatever it takes to run it
    huge_bytes: int = 0  # for huge pages, beside `memory_bytes` or the provider's default
    # Whether the containers have memory limits, so that the pod's control group may have one.
    memory_limited: bool = attrs.field(default=True, eq=False)

    @property
    def all_bytes(self) -> int:
        """The memory that the pod asks for."""
        return self.memory_bytes + self.huge_bytes


@attrs.frozen
class Attachment:
    """A network namespace on the node whose place a VM takes; see IJoinsNamespaces."""

    namespace: Path  # such as /run/netns/cni-1
    interface: str = "eth0"  # the link in it whose place the VM takes


@attrs.frozen
class VmRequest:
    """What is asked of a VM: by its pod and the pod's handler, or by the pool."""

    size: Size = Size()
    hostname: str = ""  # as the pod has it; "": the machine keeps its own
    annotations: Mapping[str, str] = attrs.field(factory=dict)
    # Names of the annotations that the configuration sets, not the pod's author.
    granted: frozenset[str] = frozenset()
    image: str = ""  # the machine image to boot, as the catalogue names it; "": the provider's own for pods
    # The image of the node's to boot, for a provider of `hypervisor.IBootsImages`; None: as `image` says.
    boot: ImageBoot | None = None
    # For a provider of `hypervisor.IBootsGuests`, of an image without our agent; None: our agent is in it.
    guest: GuestBoot | None = None
    attachment: Attachment | None = None  # only for providers of IJoinsNamespaces; None: their own network
    # The node's control group in which the VM's process is to count; "": none in particular.
    cgroup_parent: str = ""
    zone: str = ""  # the zone of its volumes, as in `volumes.VolumeDisk.zone`; "": any


@attrs.frozen
class InstanceSpec:
    """The specification of a VM to launch."""

    token: str  # [0-9a-f]{32}: the idempotency key, which the caller has recorded before the call
    sandbox_id: str  # the sandbox that the VM is for, or that it will be once it is claimed from the pool
    cluster: str
    node: str
    identity: Identity  # the provider fills in its network
    request: VmRequest = VmRequest()
    # The directory of the state that the VM starts from, for a provider of `keeping.IStartsKeptVms`;
    # None: from the provider's own image. Other providers refuse it with FailedPrecondition.
    kept: Path | None = None


@attrs.frozen
class Instance:
    """A VM as the IaaS knows it."""

    id: str  # chosen by the provider
    token: str
    sandbox_id: str
    state: InstanceState
    address: str = ""  # the pod's IP; "": none yet
    more_addresses: tuple[str, ...] = ()  # its further addresses, of either family
    agent_host: str = ""  # where the node reaches its agent; usually the same as the address
    # The agent's TCP port; 0: no agent of ours is in it. Nobody listens there if `IReachesAgents` has an
    # endpoint for it.
    agent_port: int = 0
    created_at: float = 0.0  # seconds since 1970 UTC
    detail: str = ""  # for people, why it is in this state: an exit reason, the console's last line
    size: str = ""  # an instance type, for people; "": the provider does not tell
    cost_per_hour: float | None = None  # US dollars; None: the provider does not tell
    zone: str = ""  # its zone, as `volumes.VolumeDisk.zone` names it; "": the provider has no zones
    asleep: bool = False  # executes nothing until it is woken; see `sleeping.ISleeps`


def launched_with(token: str, instances: Iterable[Instance]) -> list[Instance]:
    """Return the VMs that were launched with this token.

    :raise ValueError: there is no token, and no VM may be taken for its."""
    if not token:
        raise ValueError("VMs are found by a token, and it is empty")
    return [instance for instance in instances if instance.token == token]


@attrs.frozen
class Console:
    """The output of a VM's console: printable text without a terminal's control sequences."""

    instance_id: str
    sandbox_id: str
    ended_at: float  # when the VM was destroyed, in seconds since 1970 UTC; 0: it was not
    detail: str  # why the VM ended, as far as is known
    text: str  # the end of the console
    output: str  # what the hypervisor itself wrote


Progress = Callable[[str], None]
"""Called with a sentence for people about what a long step is doing."""


@attrs.frozen
class ReadOnlyDisk:
    """A file of the node that a VM is shown as a read-only disk."""

    name: str  # [0-9a-f]{64}: depends on its content; disks of the same name are the same disk
    path: Path  # a regular file of whole sectors of 512 bytes, which is no longer written to


@attrs.frozen
class ProviderContext:
    """The facts about the daemon that a provider gets when it is made (see `registry.ProviderFactory`)."""

    state_dir: Path  # survives reboots; a provider uses the subdirectory of its own name
    # Emptied by a reboot, for sockets and pid files; a provider uses the subdirectory of its own name.
    run_dir: Path
    cluster: str
    node: str
    # For `start`: makes one file of the images that VMs are to have from the start; None: there are none.
    preload: Callable[[Progress], Awaitable[Preload | None]] | None = None
    # For `start`: makes disks of the layers of these images, for a provider that shows them to its VMs.
    preload_disks: Callable[[Progress], Awaitable[Sequence[ReadOnlyDisk]]] | None = None
    source: str = "configuration"  # the name of the configuration file, for errors
    # The networks of the cluster's pods and Services, which are to see pods' own addresses.
    cluster_networks: tuple[IPv4Network | IPv6Network, ...] = ()
    network_policies: bool = False  # pods are closed until their firewalls are set; see IFirewallsPods
    # Whether VMs will be asked to join namespaces; `start` fails where they can't. See IJoinsNamespaces.
    joins_namespaces: bool = False
    observer: Observer = NULL_OBSERVER  # notified of the requests to a cloud
    tenant: str = ""  # of the provider; see `tenants`
    # Which addresses are whose, on a node with tenants; None: all of its pods are of one provider.
    ranges: AddressRanges | None = None

    @property
    def owner(self) -> str:
        """What marks VMs in the IaaS as this node's and tenant's: the value of the tag for the node."""
        return f"{self.node}@{self.tenant}" if self.tenant else self.node

    def located(self, place: str) -> str:
        """Return where VMs are made, for people: the tenant with the place."""
        return f"{place}, tenant {self.tenant}" if self.tenant else place


class IListsRarely(Interface):
    """Also provided by an IPodProvider whose lists are dear, so that the daemon asks for one rarely.

    It learns from the silence of VMs' agents which of them may have ended, and looks at these by itself."""

    def list_seconds() -> float:
        """Return how long after one list the daemon is to ask for the next, in seconds. It changes with what
        the IaaS serves."""

    def agent_heard(instance_id: str, heard: bool) -> None:
        """Learn that a VM's agent has fallen silent, or is heard again. Idempotent; VMs that it does not know
        are ignored.

        A VM that has ended is told to those who `watch`."""


class IInVpc(Interface):
    """Also provided by an IPodProvider whose VMs have addresses of a network that is not the pods' own.

    The node may also give their pods addresses of its own pod subnet, by tunnels."""


class IJoinsNamespaces(Interface):
    """Also provided by an IPodProvider whose VMs can join a network namespace of the node.

    Such a VM (`VmRequest.attachment`) takes over the addresses, routes and MTU of a link there, and gets
    and sends that link's frames. The namespace must exist for as long as the VM."""


@attrs.frozen
class MemoryRange:
    """A part of a VM's memory: its address in the guest and its size, in bytes."""

    address: int
    size: int


class IGuest(Interface):
    """The requests of a provider to a VM's guest when the VM becomes smaller, or larger again."""

    def release(ranges: Sequence[MemoryRange], seconds: float) -> Awaitable[None]:
        """Have the guest take all of this memory out of use, or none.

        `seconds` later it uses again the memory that is still there.

        :raise FailedPrecondition: running processes need it, or the guest can't take it out of use.
        :raise InfranetesError: it is not known to be out of use, and is in use again later.
        """

    def restore(ranges: Sequence[MemoryRange]) -> Awaitable[None]:
        """Have the guest use again memory that is still there. Idempotent. Fails with InfranetesError."""

    def use_processors(count: int) -> Awaitable[None]:
        """Have the guest use `count` processors and leave the others idle. Idempotent.

        :raise InfranetesError: it is not known whether it does.
        """


class IResizesVms(Interface):
    """Also provided by an IPodProvider that can change the size of VMs while they run.

    - Calls for one VM are served one after the other. Cancelling a Deferred only ends the wait.
    - Only the hypervisor keeps a VM's size, so a restarted daemon finds it there. It ends with the VM."""

    def resize(instance_id: str, size: Size, guest: IGuest | None = None) -> Deferred[Size]:
        """Make a running VM as large as one newly made for `size`, as far as is possible. Idempotent.

        Fires with the size that the VM has then. That is `size`, except where the VM has more or less than a
        newly made one: there, it is what the VM leaves to the pod. A VM that could not be made larger has no
        more than before, as far as it gives back what was plugged in.

        :param size: a field of 0 leaves that resource as it is.
        :param guest: is asked before memory is taken out; without it, none is. It leaves processors idle that
            can't be taken out.
        :raise NotFound: there is no such VM.
        :raise InvalidArgument: more than a VM can have.
        :raise FailedPrecondition: its hypervisor or its guest refuses; the VM is as large as before.
        :raise Unavailable: the VM does not run, or its hypervisor does not answer.
        :raise DeadlineExceeded: its guest does not use in time what was plugged in.
        """


class IPlacesVms(Interface):
    """Also provided by an IPodProvider whose VMs are processes of this node.

    They count in their pods' control groups (`VmRequest.cgroup_parent`), where kubelet measures and
    limits them."""

    def place(instance_id: str, cgroup_parent: str, size: Size) -> Deferred[None]:
        """Move a VM that was launched outside a pod's control group into one. Idempotent.

        Resources that it used before stay charged where they were. As in `launch`, the VM stays outside if
        the pod's limit has no room for what a VM takes beyond the pod's own (`Size.overhead_bytes`).

        :param size: what the pod asks for.

        :raise NotFound: there is no such VM.
        :raise InvalidArgument: that can't be a control group.
        :raise FailedPrecondition: it is in another pod's, or the daemon may not put it there.
        :raise Unavailable: the VM does not run, or the node does not put it there.
        """


class IGivesIdentityPrivately(Interface):
    """Also provided by an IPodProvider whose VMs get their identity by a channel that nobody else can read.

    So their first key and certificate are as good as later ones, and are not replaced early."""


class IReachesAgents(Interface):
    """Also provided by an IPodProvider some of whose VMs have a channel for their agents that nobody else can
    reach.

    So neither end shows a certificate there, and what is not encrypted is heard by nobody."""

    def agent_endpoint(instance_id: str) -> IStreamClientEndpoint | None:
        """Return what leads to a VM's agent, for one connection at a time. Works before `start`, too.

        None: its address and port do, by TLS, as in VMs of earlier releases and those that boot images."""


class IBoundsStarts(Interface):
    """Also provided by an IPodProvider whose pods' starts take so much of the node's processors that many at
    once delay each other."""

    def starts_at_once() -> int:
        """Return how many pods may start at once, once the provider has started; 0: any number."""


class IPinsVms(Interface):
    """Also provided by an IPodProvider whose VMs are processes of this node, which can be pinned."""

    def pin(instance_id: str, cpus: str, mems: str) -> Deferred[None]:
        """Have a VM run on some of the node's processors, and use some of its memory nodes. Idempotent.

        It holds until the next call or the VM's end, also without the daemon.

        :param cpus: a list such as 0-2,4; "": all that its control group may use. :param mems: likewise.

        :raise NotFound: there is no such VM.
        :raise InvalidArgument: the node, or the pod's control group, does not have these.
        :raise FailedPrecondition: the daemon may not do that.
        :raise Unavailable: the VM does not run.
        """


class IHasCatalogue(Interface):
    """A provider whose IaaS has machine images. `imgprovider` set to the provider's name selects them."""

    catalogue: IImageCatalogue = Attribute("Finds them; works once the provider has started.")


class IHasGuestImage(Interface):
    """Also provided by an IPodProvider that knows the image that its VMs boot."""

    def container_providers() -> Sequence[str]:
        """Return the names of the container providers in a VM, the default first; empty: not known, or not
        yet."""


class IHasConsoles(Interface):
    """A provider that can show its VMs' consoles."""

    def consoles(sandbox: str) -> Deferred[Sequence[Console]]:
        """Return the consoles of sandboxes whose ids begin with `sandbox`: of existing VMs, then of those
        destroyed last; each newest first."""


@attrs.frozen
class ShownDisk:
    """The place of a disk in a VM, on its virtio-scsi host."""

    name: str  # the ReadOnlyDisk's
    target: int
    lun: int


class IShowsDisks(Interface):
    """Also provided by an IPodProvider that can show running VMs files of the node as disks.

    - Only the hypervisor keeps which disks are shown, so a restarted daemon finds them. They end with the VM.
    - A file that is deleted while it is shown stays readable for the VM.
    - Calls for one VM are served one after the other, those for different VMs side by side. Cancelling a
      Deferred ends the wait alone.
    - A disk has a place for as long as it is shown: the VM finds it on its virtio-scsi host by target and
      LUN, a moment after the call has returned. A place that is free again rests while there are others.
    """

    def show_disks(instance_id: str, disks: Sequence[ReadOnlyDisk]) -> Deferred[Sequence[ShownDisk]]:
        """Show files to a VM; return where each is, in the same order. Idempotent by name.

        When it fails, none is shown that was not shown before.

        :raise NotFound: there is no such VM.
        :raise InvalidArgument: a name that can't be.
        :raise ResourceExhausted: the VM has no place for so many disks; the message says how many it has.
        :raise FailedPrecondition: a file is not there, can't be read, or is not a disk.
        :raise Unavailable: the VM does not run, or the hypervisor does not answer, or refuses.
        """

    def shown_disks(instance_id: str) -> Deferred[Sequence[ShownDisk]]:
        """Look up the disks that a VM is shown; a VM that does not run is shown none.

        :raise NotFound: there is no such VM.
        :raise Unavailable: the hypervisor does not answer.
        """

    def hide_disks(instance_id: str, names: Sequence[str]) -> Deferred[None]:
        """Take disks from a VM, which has unmounted them, and close their files. Idempotent.

        Names of disks that it is not shown are ignored. A VM that still uses one gets read errors.

        :raise NotFound: there is no such VM.
        :raise Unavailable: the hypervisor does not answer, or does not release a disk. Disks that it has
            released stay hidden.
        """


class Share(enum.Enum):
    """What the node's kernel has once for all, and each pod has a share of."""

    CONNECTIONS = "connections"  # begun by the pod, in the table of all
    NEIGHBOURS = "neighbours"  # machines that the pod looks for in the node's networks
    FRAGMENTS = "fragments"  # of datagrams that are not whole yet


@attrs.frozen
class RefusedPackets:
    """Packets of a pod that were dropped because a share is used up."""

    total: int
    lately: int  # of these, since the provider looked last time


class IBridgesVms(Interface):
    """Also provided by an IPodProvider whose VMs are on a bridge of the node."""

    bridge: str = Attribute("The bridge's name.")


class ICountsRefusals(Interface):
    """Also provided by an IPodProvider that gives pods shares of what the node's kernel has once for all."""

    def refusals(instance_id: str) -> Mapping[Share, RefusedPackets]:
        """Return what was refused to a VM, as of a short while ago. Shares that sufficed are left out."""


class IFirewallsPods(Interface):
    """Also provided by an IPodProvider that enforces pods' firewalls itself, where no pod gets around them.

    - Where `ProviderContext.network_policies` is set, a VM is CLOSED from before it can send anything until
      its firewall is set; otherwise nothing is enforced.
    - The firewall that was set last is in force until the VM is destroyed, even while no daemon runs, and the
      next daemon puts it in force again. Whatever it says, the VM can be reached from its node.
    - Established connections are judged by it too.
    """

    def set_firewall(instance_id: str, firewall: PodFirewall) -> Deferred[None]:
        """Replace a VM's firewall by another one atomically. Idempotent.

        :raise NotFound: there is no such VM.
        :raise FailedPrecondition: this node is not configured to enforce firewalls.
        :raise Unavailable: it is not in force; the one before is.
        """


class IPodProvider(Interface):
    """A maker of the VMs that become pods.

    - Methods never block the reactor. Those that return a Deferred fail only with errors of
      `infranetes_common.errors`; of these, only `Unavailable` means that the same call may succeed later.
    - Calls for different tokens run side by side. A provider serializes calls for the same token.
    - Cancelling a Deferred may stop the wait, but leaves no VM half made or half removed.
    - A provider keeps what it has to know of a VM where that survives the daemon, such as tags in the IaaS
      or files on the node: the daemon may be killed at any instant.
    - It knows nothing of containers.
    """

    name: str = Attribute("The name in the configuration, such as `qemu`.")

    def start(progress: Progress) -> Deferred[None]:
        """Get ready to launch: check credentials, find networks, make templates.

        Called once, before every method but `configure_network`. It finds the VMs that earlier daemons
        launched and changes none of them.

        :param progress: called as long steps get on.
        :raise FailedPrecondition: a person has to provide something; the message says what.
        """

    def stop() -> Deferred[None]:
        """Release sockets, threads and timers. VMs keep running. Idempotent."""

    def configure_network(pod_cidr: str) -> Deferred[None]:
        """Set the subnet that pods get addresses from, as UpdateRuntimeConfig does. Idempotent.

        Called before or after `start`. Existing VMs keep their addresses.

        :param pod_cidr: one subnet, or several of different families, separated by commas.
        :raise InvalidArgument: not a subnet that this provider can serve.
        :raise FailedPrecondition: running VMs have addresses of another subnet.
        """

    def launch(spec: InstanceSpec) -> Deferred[Instance]:
        """Ask for a VM. Fires, with a VM that is PENDING or RUNNING, once the IaaS has accepted the request.

        Idempotent by `spec.token`: a second call returns the first one's VM, also while the first call is
        under way and after a restart of the daemon. When a launch fails, nothing of the VM remains: no
        process, address, disk or interface. If the daemon is killed during a launch, `list` shows whatever
        exists of the VM, and `destroy` removes it.

        :raise ResourceExhausted: no address, capacity or quota is left.
        :raise InvalidArgument: a size or an annotation that this provider can't serve.
        :raise FailedPrecondition: it has zones, and launches in others than that of the request; says where.
        """

    def wait_running(instance_id: str, timeout: float) -> Deferred[Instance]:
        """Wait until a VM is RUNNING, has its address, and has been given its identity.

        :param timeout: seconds.
        :raise DeadlineExceeded: it took longer than that; the VM is left as it is.
        :raise NotFound: there is no such VM.
        :raise Unavailable: it ended meanwhile; the message has the reason and the end of the console.
        """

    def get(instance_id: str) -> Deferred[Instance]:
        """Look up a VM. :raise NotFound: there is no such VM, or it is destroyed."""

    def list() -> Deferred[list[Instance]]:
        """List every VM of this cluster and node that is not destroyed.

        Includes those that have ended, and those that the daemon has no record of. Never another node's.
        """

    def destroy(instance_id: str) -> Deferred[None]:
        """End a VM and release its address, disk and interface. Fires when that is done, or when a cloud has
        accepted the request and completes it by itself. Idempotent.

        It is no error if there is no such VM.
        """

    def watch(ended: Callable[[Instance], None]) -> None:
        """Call `ended` from now on with each VM that ends without `destroy`.

        It is called in the reactor's thread, once for each VM.
        """

    def status() -> Mapping[str, str]:
        """Return the status of this provider that `crictl info` shows, for people."""
