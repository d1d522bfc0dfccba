# SPDX-License-Identifier: Apache-2.0
"""The DHCP server of one VM.

A VM may send as many requests as it likes, and more than it is answered cost the daemon nothing: it reads a
few in a second, each answered at most once, and meanwhile the kernel keeps a few more and drops the rest.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from twisted.internet.interfaces import IDelayedCall, IReadDescriptor
from twisted.internet.task import LoopingCall
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from infranetes.providers.qemu.dhcp import packets6
from infranetes.providers.qemu.dhcp.lease import Answer, Lease
from infranetes.providers.qemu.dhcp.lease6 import Lease6
from infranetes.providers.qemu.dhcp.messages import Kind
from infranetes.providers.qemu.dhcp.tap import receive, send
from infranetes_common.concurrency import run_in_thread
from infranetes_common.reactors import IReactor

A_SECOND, AT_ONCE = 16, 32  # frames that are read
_IN_A_TURN = 8  # of the reactor
_REST_SECONDS = 0.25
_ADVERTISING_SECONDS = 3600.0  # of the 18 hours for which a router is believed in
_log = Logger()


@implementer(IReadDescriptor)
class Server:
    """Answers one VM, from `start` on until `stop`.

    :param name: its tap's, for people. :param descriptor: of its tap, which it closes in the end.
    :param taken: called when the VM has taken its address.
    :ivar lease: what it tells. :ivar lease6: what it tells of IPv6; None: nothing.
    :ivar has_address: whether the VM has taken its address.
    """

    def __init__(
        self,
        reactor: IReactor,
        name: str,
        descriptor: int,
        lease: Lease,
        lease6: Lease6 | None,
        taken: Callable[[], None],
    ) -> None:
        self._reactor = reactor
        self._name = name
        self._descriptor = descriptor
        self.lease = lease
        self.lease6 = lease6
        self._advertising = LoopingCall(self._advertise)
        self._advertising.clock = reactor
        self._taken = taken
        self.has_address = False
        self._left = float(AT_ONCE)
        self._counted_at = reactor.seconds()
        self._pause: IDelayedCall | None = None

    def start(self) -> None:
        """Begin to answer."""
        self._reactor.addReader(self)
        self._advertising.start(_ADVERTISING_SECONDS).addErrback(
            lambda failure: _log.failure("router advertisements ended", failure=failure)
        )

    async def stop(self) -> None:
        """End, and close the tap. Idempotent."""
        if self._advertising.running:
            self._advertising.stop()
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        if self._descriptor >= 0:
            self._reactor.removeReader(self)
            descriptor, self._descriptor = self._descriptor, -1
            # With it the tap goes, for which the kernel waits.
            await run_in_thread(self._reactor, os.close, descriptor)

    # IReadDescriptor

    def fileno(self) -> int:
        return self._descriptor

    def logPrefix(self) -> str:
        return f"DHCP on {self._name}"

    def connectionLost(self, reason: Failure) -> None:
        # The tap is down, and may be up again; or gone, with its namespace, and nothing is heard of it.
        if self._descriptor >= 0:
            self._rest()

    def doRead(self) -> None:
        for _ in range(_IN_A_TURN):
            if not self._may_read():
                self._rest()
                return
            if not self._answer_one():
                return

    # ---- Steps

    def _may_read(self) -> bool:
        now = self._reactor.seconds()
        self._left = min(self._left + (now - self._counted_at) * A_SECOND, AT_ONCE)
        self._counted_at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True

    def _rest(self) -> None:
        """Hear nothing for a while."""
        self._reactor.removeReader(self)
        if self._pause is None:
            self._pause = self._reactor.callLater(_REST_SECONDS, self._resume)

    def _resume(self) -> None:
        self._pause = None
        self._reactor.addReader(self)

    def _answer_one(self) -> bool:
        """Read and answer a frame. Return whether there may be another one."""
        try:
            frame = receive(self._descriptor)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:  # the tap is down, or gone
            self._rest()
            return False
        if frame[12:14] == packets6.KIND:
            answer6 = self.lease6.answer(frame) if self.lease6 is not None else None
            if answer6 is not None:
                self._send(answer6)
            return True
        answer = self.lease.answer(frame)
        if answer is not None:
            self._send(answer.frame)
            self._note(answer)
        return True

    def _advertise(self) -> None:
        if self.lease6 is not None:
            self._send(self.lease6.advertisement())

    def _send(self, frame: bytes) -> None:
        with contextlib.suppress(OSError):  # then the answer is lost, and the client asks again
            send(self._descriptor, frame)

    def _note(self, answer: Answer) -> None:
        if answer.kind in (Kind.ACK, None) and not self.has_address:
            self.has_address = True
            self._taken()
