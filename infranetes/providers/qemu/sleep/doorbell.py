# SPDX-License-Identifier: Apache-2.0
"""The tap of a VM that sleeps, which the daemon has until a process has it again.

It is the VM's own tap, at its place in the network, with all that is forbidden and counted there. Once the VM
is called nothing more is read: what comes then waits in the tap for the VM.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from twisted.internet.interfaces import IDelayedCall, IReadDescriptor
from twisted.python.failure import Failure
from zope.interface import implementer

from infranetes.providers.qemu.dhcp.tap import receive, send
from infranetes.providers.qemu.sleep.frames import Call, Sleeping
from infranetes_common.reactors import IReactor

_AT_A_TIME = 16  # frames in one turn of the reactor
AGAIN_SECONDS = 5.0  # after a call that has not woken the VM it is listened for the next one


@implementer(IReadDescriptor)
class Doorbell:
    """Answers for a VM, and tells that it is called.

    :param descriptor: of its tap, which `thd_close` closes. :param called: called when the VM is called."""

    def __init__(
        self, reactor: IReactor, descriptor: int, sleeping: Sleeping, called: Callable[[], None]
    ) -> None:
        self._reactor = reactor
        self._descriptor = descriptor
        self._sleeping = sleeping
        self._called = called
        self._listening = False
        self._again: IDelayedCall | None = None

    def listen(self) -> None:
        """Listen, until the VM is called. Idempotent."""
        self._cancel()
        if not self._listening and self._descriptor >= 0:
            self._listening = True
            self._reactor.addReader(self)

    def rest(self) -> None:
        """Listen no more; what comes waits. Idempotent."""
        self._cancel()
        if self._listening:
            self._listening = False
            self._reactor.removeReader(self)

    def duplicate(self) -> int:
        """Return another descriptor of the tap. :raise OSError: there is none."""
        return os.dup(self._descriptor)

    def thd_close(self) -> None:
        """Close the tap, which goes if nobody else has it. Rest before. Idempotent. Waits for the kernel."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _cancel(self) -> None:
        again, self._again = self._again, None
        if again is not None and again.active():
            again.cancel()

    # ---- IReadDescriptor

    def fileno(self) -> int:
        return self._descriptor

    def logPrefix(self) -> str:
        return "doorbell"

    def connectionLost(self, reason: Failure) -> None:
        self._listening = False

    def doRead(self) -> None:
        for _ in range(_AT_A_TIME):
            if not self._listening:
                return
            try:
                frame = receive(self._descriptor)
            except OSError:  # there is none, or the tap is down for a moment
                return
            heard = self._sleeping.heard(frame)
            if heard is Call.CALL:
                self.rest()
                self._again = self._reactor.callLater(AGAIN_SECONDS, self.listen)
                self._called()
            elif heard is not None:
                with contextlib.suppress(OSError):  # it asks again
                    send(self._descriptor, heard)
