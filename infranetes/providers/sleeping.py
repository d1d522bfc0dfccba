# SPDX-License-Identifier: Apache-2.0
"""Providers whose VMs can sleep: their memory is in a file of the node, and no process has it."""

from __future__ import annotations

from collections.abc import Callable

import attrs
from twisted.internet.defer import Deferred
from zope.interface import Interface


@attrs.frozen
class Slept:
    """What became of a VM that sleeps. :ivar size: bytes on the node's disk. :ivar seconds: it took."""

    size: int
    seconds: float


@attrs.frozen
class Activity:
    """What a VM has done since its process began. Both only ever grow, until it sleeps.

    :ivar cpu_nanos: the processor time of its process. :ivar packets: those that it has sent."""

    cpu_nanos: int
    packets: int


class ISleeps(Interface):
    """Also provided by an IPodProvider whose VMs can sleep.

    - A VM that sleeps is RUNNING, with `Instance.asleep`: its address, its disks, its volumes and what is
      made of it in the node's network stay its own. It executes nothing and takes no memory.
    - It wakes by `wake` alone, and goes on where it was: its processes, connections and clock know nothing
      of it. Its agent's connections are lost.
    - Whatever becomes of a call (it fails, the daemon is killed), the VM executes, or sleeps, or has ended;
      the next daemon knows which. `destroy` ends it at any time, also while a call is under way. Cancelling a
      Deferred ends the wait alone.
    - It sleeps on when the daemon stops. While no daemon runs, nothing wakes it.
    - It ends if the node is started anew meanwhile, as every VM of the node.
    - Calls for one VM are served one after the other."""

    def sleep(instance_id: str) -> Deferred[Slept]:
        """Write a VM's memory to the node's disk, and end its process. Idempotent.

        When it fails, the VM executes as before.

        :raise NotFound: there is no such VM.
        :raise FailedPrecondition: VMs like this one can't sleep, or not now; says why.
        :raise ResourceExhausted: there is no room for its memory.
        :raise Unavailable: the VM does not run, or ends meanwhile, or its hypervisor does not do it.
        """

    def wake(instance_id: str) -> Deferred[None]:
        """Let a VM that sleeps execute again. Idempotent: for one that executes, nothing is done.

        A VM whose memory can't be used any more has ended then, which is told as any end is.

        :raise NotFound: there is no such VM.
        :raise Unavailable: it sleeps on, since the node lacks something now; or it has ended, and says why.
        """

    def activity(instance_id: str) -> Deferred[Activity]:
        """Return what a VM has done. :raise NotFound: there is no such VM. :raise Unavailable: it does not
        execute."""

    def when_called(called: Callable[[str], None]) -> None:
        """Call `called` from now on with the id of each VM that sleeps and is sent a packet.

        It is called in the reactor's thread, once, and again if the VM still sleeps a while later and is sent
        another one. A packet that looks for the VM's hardware address is answered without that, as a rule.
        The first packet may be lost: whoever sent it has to send it again, as TCP does."""

    def slept_bytes() -> int:
        """Return how much of the node's disk the memory of all VMs that sleep takes."""
