# SPDX-License-Identifier: Apache-2.0
"""Keeping the clocks of running VMs right by the node's own clock, on every provider."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from infranetes.machines.pod_machine import PodMachine
from infranetes_common.concurrency import sleep, start
from infranetes_common.errors import InfranetesError

ROUND_SECONDS = 60.0  # how long a round takes, in which each VM is asked once
FIRST_SECONDS = 5.0  # the pause while there are no VMs to ask

_log = Logger()


class Timekeeping:
    """Reads the clocks of VMs one after the other, and has them corrected.

    :param machines: returns the VMs whose agents can be reached now.
    """

    def __init__(self, clock: IReactorTime, machines: Callable[[], Iterable[PodMachine]]) -> None:
        self._clock = clock
        self._machines = machines
        self._rounds: Deferred[None] | None = None
        self._asked: set[Deferred[None]] = set()

    def start(self) -> None:
        """Begin the rounds."""
        self._rounds = start(self._go_on())
        self._rounds.addErrback(lambda _: None)

    def stop(self) -> None:
        """End the rounds. Idempotent."""
        for under_way in (self._rounds, *self._asked):
            if under_way is not None:
                under_way.cancel()

    async def _go_on(self) -> None:
        while True:
            machines = self._reachable()
            for machine in machines:
                self._ask(machine)
                await sleep(self._clock, ROUND_SECONDS / len(machines))
            if not machines:
                await sleep(self._clock, FIRST_SECONDS)

    def _reachable(self) -> list[PodMachine]:
        try:
            return list(self._machines())
        except Exception:  # the next round is made all the same
            _log.failure("looking for VMs whose clocks to keep failed")
            return []

    def _ask(self, machine: PodMachine) -> None:
        """Correct the VM's clock in the background, so that a VM that does not answer delays no other."""
        asked = start(_correct(machine))
        self._asked.add(asked)
        asked.addErrback(lambda _: None).addBoth(lambda _: self._asked.discard(asked))


async def _correct(machine: PodMachine) -> None:
    try:
        await machine.correct_clock()
    except (InfranetesError, CancelledError) as error:
        _log.debug("vm {vm}: its clock can't be read now: {error}", vm=machine.id, error=error)
    except Exception:
        _log.failure("vm {vm}: its clock can't be read", vm=machine.id)
