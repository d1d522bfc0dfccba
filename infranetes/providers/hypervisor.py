# SPDX-License-Identifier: Apache-2.0
"""A VM as its hypervisor alone shows it, whatever runs in it: its power, its console, what it uses.

    GuestState   what is true                                               goes to
    PREPARED     its hardware exists, and executes nothing yet              RUNNING OFF
    RUNNING      it executes, from its first instruction, through reboots   OFF CRASHED
    OFF          the guest has powered it off, or it was switched off       -
    CRASHED      its kernel has panicked, or its hypervisor has failed      -

A daemon that follows one which was killed finds the same state: it is the hypervisor's, or recorded.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IStreamClientEndpoint
from zope.interface import Attribute, Interface

if TYPE_CHECKING:
    from infranetes.providers.machine_images import Cd
    from infranetes_common.identity import Network


class GuestState(enum.Enum):
    """The state of a VM's guest; see the table above."""

    PREPARED = "prepared"
    RUNNING = "running"
    OFF = "off"
    CRASHED = "crashed"


@attrs.frozen
class GuestStatus:
    """The state of a VM's guest. Times are nanoseconds since 1970 UTC; 0: not yet."""

    state: GuestState
    started_at: int = 0
    finished_at: int = 0
    exit_code: int = 0  # of what has ended: 0 if the guest powered off by itself, 137 if it was switched off
    reason: str = ""  # such as GuestPanicked; "": nothing out of the ordinary
    message: str = ""  # for people


@attrs.frozen
class GuestUsage:
    """What a VM uses of its node, counted from its start. None: not known."""

    cpu_nanos: int | None = None
    memory_bytes: int | None = None  # resident, with the hypervisor's own
    rx_bytes: int | None = None  # received by the guest
    rx_errors: int | None = None
    tx_bytes: int | None = None
    tx_errors: int | None = None
    disk_bytes: int | None = None  # what it wrote over its image


class IConsole(Interface):
    """The serial console of one VM: bytes that the guest writes, numbered from its first, and a keyboard.

    The numbers go on after restarts of the daemon and reboots of the guest. What is older than the console's
    size is forgotten: `begin` grows.
    """

    begin: int = Attribute("The number of the first byte that is kept.")
    end: int = Attribute("The number that the next byte will have.")
    ended: bool = Attribute("Whether no more bytes will come: the VM is gone, and `end` is final.")
    writable: bool = Attribute("Whether there is a keyboard.")

    def read(offset: int, size: int) -> Deferred[bytes]:
        """Return up to `size` bytes from `offset` on: b"" where there are none yet. Never blocks the reactor.

        :raise InvalidArgument: they are no longer kept, or are not numbered so far."""

    def changed() -> Deferred[None]:
        """Return a Deferred that fires once `end` grows or `ended` becomes true. Cancellable.

        It may fire for nothing. Look at `end` right before: what it has grown before the call is not told."""

    def write(data: bytes) -> Deferred[None]:
        """Type into the console; fires when it is taken. At most 64 KiB wait for a guest that takes nothing.

        :raise FailedPrecondition: it is read-only. :raise ResourceExhausted: the guest takes nothing.
        :raise Unavailable: the VM does not run."""


class IHypervisor(Interface):
    """One VM's hypervisor. Every method fails with `NotFound` once the VM is destroyed.

    Cancelling a Deferred ends the wait alone.
    """

    console: IConsole = Attribute("Its serial console.")
    drives: int = Attribute(
        "How many CD drives it has; 0: what its guest is told, it was told at its launch."
    )

    def status() -> Deferred[GuestStatus]:
        """Look up the state of the guest.

        :raise Unavailable: the hypervisor does not answer."""

    def watch(changed: Callable[[GuestStatus], None]) -> Callable[[], None]:
        """Call `changed`, in the reactor's thread, after each change of state. Return what ends that."""

    def execute() -> Deferred[GuestStatus]:
        """Let a PREPARED VM execute. Idempotent: one that runs, or has ended, is left as it is.

        :raise Unavailable: the hypervisor does not answer."""

    def network() -> Deferred[Network]:
        """Return the network that the VM's card is to have, which the guest learns by DHCP or by its CDs."""

    def has_address() -> bool | None:
        """Return whether the guest has asked for its address and was given it; None: that can't be told."""

    def insert_cds(cds: Sequence[Cd]) -> Deferred[None]:
        """Put CDs into the VM's drives, in the place of those that are there; drives beyond are emptied.

        Idempotent by content. A guest that executes notices a change when it looks.

        :param cds: at most `machine_images.DRIVES`. :raise InvalidArgument: more, or what no CD can hold.
        :raise ResourceExhausted: the node has no room for them; those before are still there.
        :raise Unavailable: the hypervisor does not answer, or the VM does not run."""

    def press_power_button() -> Deferred[None]:
        """Ask the guest by ACPI to power off, which it may ignore. Idempotent.

        :raise Unavailable: the hypervisor does not answer, or the VM does not run."""

    def switch_off() -> Deferred[GuestStatus]:
        """End the VM's execution at once. Idempotent. It is destroyed by `IPodProvider.destroy` alone.

        :raise Unavailable: the hypervisor does not answer."""

    def usage() -> Deferred[GuestUsage]:
        """Measure what it uses. :raise Unavailable: that can't be measured now."""

    def guest_agent() -> IStreamClientEndpoint | None:
        """Return where QEMU's guest agent can be reached, if it is there; None: there is no such channel."""

    def screenshot() -> Deferred[bytes]:
        """Return what its screen shows, as PNG.

        :raise NotOffered: it has no screen, or none that can be seen. :raise Unavailable: try again."""

    def screen() -> IStreamClientEndpoint:
        """Return where its screen and keyboard are, by the RFB protocol (VNC).

        :raise NotOffered: it has no screen, or none that can be reached."""


class IHasHypervisors(Interface):
    """Also provided by an IPodProvider of whose VMs some may have no agent of ours, and are known by their
    hypervisors: see IBootsImages, and IBootsGuests."""

    def hypervisor(instance_id: str) -> IHypervisor:
        """Return a VM's hypervisor.

        :raise NotFound: there is no such VM, or it is known by its agent alone."""


class IBootsGuests(IHasHypervisors):
    """Also provided by a cloud's IPodProvider whose own images may be without our agent.

    A request with `VmRequest.guest` makes a VM whose guest is told what that says, at once: it executes from
    its launch on, and counts as PREPARED until `IHypervisor.execute` is called. It has no CD drives. Its
    `agent_port` is 0. As with IBootsImages, the end of the guest is no end of its VM."""

    user_data_bytes: int = Attribute("How many bytes of user-data the cloud takes.")


class IBootsImages(IHasHypervisors):
    """Also provided by an IPodProvider whose VMs may be booted from images of anybody's.

    `launch` of a request with `VmRequest.boot` makes a PREPARED VM, which is RUNNING as an `Instance`: the VM
    has its address, and its guest executes once `IHypervisor.execute` is called. Its `agent_port` is 0 if our
    agent is not expected in it. One whose image has our agent executes when `launch` has fired: what it is
    told, it is told by its agent, which may still be starting.

    The end of a guest is no end of its VM: until it is destroyed, the Instance stays RUNNING, keeps its
    address, and is not told to `IPodProvider.watch`. What it took of the node's memory and processors is
    given back as soon as the end is recorded. `IHypervisor.watch` tells the end, and `status` knows it, also
    for later daemons.
    """
