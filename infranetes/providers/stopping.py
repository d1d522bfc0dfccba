# SPDX-License-Identifier: Apache-2.0
"""Providers that can stop VMs which no pod has yet, and start each again once a pod gets it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twisted.internet.defer import Deferred
from zope.interface import Interface

if TYPE_CHECKING:
    from infranetes.providers.interface import Instance, VmRequest


class IStopsVms(Interface):
    """Also provided by an IPodProvider that can stop VMs, which then cost their disks alone.

    - A VM that `stop_vm` has stopped is STOPPED: it keeps its id, its token and its disks, `list` shows it,
      `destroy` ends it, and it is not reported to those who `watch`. With the next daemon, too.
    - `launch` with its token starts it, with the identity of the specification, and returns it PENDING or
      RUNNING; of the request nothing else counts, as the VM has been made. Where it can't be started (the
      IaaS has no room for it, refuses, or has lost it), `launch` destroys it, and makes another VM of that
      token, as the specification says. So what `launch` promises holds for started VMs as well.
    - The guest keeps the identity that a VM was launched with in memory only, and the IaaS no longer has it
      once the VM is stopped; where the IaaS can't forget it, the guest does not take it on again, and its
      certificate has soon expired. What `launch` brings is all that the VM can be reached with.
    - A VM that somebody else stops has ENDED, as ever."""

    def check_stoppable(request: VmRequest) -> None:
        """Check that a VM made as a request says can be stopped and started again. Works before `start`.

        :raise InvalidArgument: it can't be; says why."""

    def stop_vm(instance_id: str, seconds: float) -> Deferred[Instance]:
        """Stop a running VM. Fires with it once it is STOPPED and its identity is gone. Idempotent.

        Cancelling the Deferred ends the wait, not the stop. A call after one that failed, or that a daemon
        was killed in, goes on where that was; so does `destroy`.

        :param seconds: how long it may take.
        :raise NotFound: there is no such VM.
        :raise InvalidArgument: this VM can't be stopped and started again; says why.
        :raise Unavailable: it has ended, or ends meanwhile.
        :raise DeadlineExceeded: it takes longer than that.
        """
