# SPDX-License-Identifier: Apache-2.0
"""The renewal of VMs' certificates: short-lived, and replaced over the channel long before they expire.

The first certificate reaches the VM with its identity. Where others may read that (user-data), it is valid
for little more than a launch, and is replaced soon after the VM is a pod, when none of its containers is
being started: an emulated processor is busy with it for more than a second. From then on the VM makes its
keys itself and the node signs them. The node records each certificate's expiry and key: a VM whose
certificate expired while no daemon ran is still recognized by that key, and gets a new certificate. A VM
whose agent is called by a channel of the hypervisor shows none, and keeps the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from twisted.internet.defer import CancelledError, Deferred, DeferredSemaphore
from twisted.logger import Logger
from twisted.python.failure import Failure

from infranetes.machines.context import MachineContext
from infranetes.machines.pod_machine import PodMachine, is_due
from infranetes_common.concurrency import settled, sleep, start
from infranetes_common.errors import InfranetesError

AT_A_TIME = 8
SOON_SECONDS = 3.0  # after a launch, so that launches begun together finish first
LATEST_SECONDS = 600.0  # after a launch, also if the pod is never idle
LONGEST_PAUSE = 60.0  # seconds between two passes

_log = Logger()


class Renewal:
    """Replaces the certificates of VMs before they expire, as long as the VMs' agents can be reached.

    :param machines: returns the VMs whose agents can be reached now.
    """

    def __init__(self, context: MachineContext, machines: Callable[[], Iterable[PodMachine]]) -> None:
        self._context = context
        self._machines = machines
        self._gate = DeferredSemaphore(AT_A_TIME)
        self._under_way: set[PodMachine] = set()
        self._passes: Deferred[None] | None = None
        self._later: set[Deferred[None]] = set()
        self._waiting: set[PodMachine] = set()  # those whose first certificate is replaced when they are idle

    def start(self) -> None:
        """Begin the passes."""
        self._passes = start(self._go_on())
        self._passes.addErrback(lambda _: None)

    def stop(self) -> None:
        """End the passes. Idempotent."""
        for under_way in (self._passes, *self._later):
            if under_way is not None:
                under_way.cancel()

    def soon(self, machine: PodMachine, busy: Callable[[], bool] = lambda: False) -> None:
        """Schedule the replacement of the certificate with which the VM was launched. Returns at once.

        :param busy: returns whether the VM should not be disturbed now."""
        if machine.first_key_is_private or not machine.needs_certificate:
            return
        later = start(self._soon(machine, busy))
        self._later.add(later)
        later.addErrback(_unexpected).addBoth(lambda _: self._later.discard(later))

    async def _soon(self, machine: PodMachine, busy: Callable[[], bool]) -> None:
        clock = self._context.clock
        latest = clock.seconds() + LATEST_SECONDS
        self._waiting.add(machine)
        try:
            await sleep(clock, SOON_SECONDS)
            while machine.client is not None and busy() and clock.seconds() < latest:
                await sleep(clock, SOON_SECONDS)
        finally:
            self._waiting.discard(machine)
        if machine.client is not None:
            await self._renew(machine)

    async def once(self) -> None:
        """Replace all certificates that are due, AT_A_TIME at once.

        Returns when each is replaced or has failed."""
        now, lifetime = self._context.clock.seconds(), self._context.times.certificate
        waits = self._waiting
        due = [
            machine
            for machine in self._machines()
            if machine not in waits and is_due(machine.facts, now, lifetime) and machine.needs_certificate
        ]
        await settled([self._renew(machine) for machine in due])

    async def _go_on(self) -> None:
        pause = min(LONGEST_PAUSE, max(0.5, self._context.times.certificate / 20))
        while True:
            await sleep(self._context.clock, pause)
            try:
                await self.once()
            except CancelledError:  # the daemon is stopping
                raise
            except Exception:  # the whole pass failed; the next one is made all the same
                _log.failure("looking for certificates to replace failed")

    async def _renew(self, machine: PodMachine) -> None:
        if machine in self._under_way:
            return
        self._under_way.add(machine)
        try:
            await self._gate.run(lambda: start(machine.renew_certificate()))
        # After any failure the certificate is still due, and the next pass tries again.
        except (InfranetesError, CancelledError) as error:
            _log.info("sandbox {sandbox} keeps its certificate for now: {error}",
                      sandbox=machine.id, error=error)  # fmt: skip
        except Exception:
            _log.failure("sandbox {sandbox} keeps its certificate for now", sandbox=machine.id)
        finally:
            self._under_way.discard(machine)


def _unexpected(failure: Failure) -> None:
    if not failure.check(CancelledError):
        _log.failure("a certificate could not be replaced", failure=failure)
