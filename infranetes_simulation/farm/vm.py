# SPDX-License-Identifier: Apache-2.0
"""One simulated VM: its record, its power, and the agent as far as the VM's behaviour lets it run.

A VM's states, and what leads from each:

    pending   its delay is over                running (behaviour never: stays)
    running   dies-after's time is over        ended
    running   ``halt``                         stopped: it has its record and disk, and no identity
    stopped   ``boot``                         pending
    stopped   the farm ends                    stopped
    others    the farm ends                    ended, as the next farm finds it
    any       ``end``                          forgotten
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall

from infranetes_common.concurrency import Flight, run_in_thread, start
from infranetes_common.errors import FailedPrecondition
from infranetes_common.identity import Identity, decode, encode
from infranetes_common.reactors import IReactor
from infranetes_simulation.farm.machine import IMachine
from infranetes_simulation.farm.namespaces import NamespaceMachine
from infranetes_simulation.farm.shared import SharedMachine
from infranetes_simulation.protocol import (
    DIES_AFTER,
    ENDED,
    IMAGES_TAG,
    LAYERS,
    NEVER,
    PENDING,
    RUNNING,
    STOPPED,
    Hardware,
    Vm,
)
from vmserver.identity.delivery import save

RECORD = "vm.json"

Report = Callable[[str, Vm], None]
"""Called with the event, running or ended, and the VM."""


@attrs.define(eq=False)
class SimulatedVm:
    """A VM and its power.

    :param directory: its own, of its record and its agent.
    """

    reactor: IReactor
    directory: Path
    report: Report
    id: str
    sandbox_id: str
    identity: Identity | None  # None: it is stopped
    tags: Mapping[str, str]
    behaviour: str
    after: float  # seconds, for dies-after
    created_at: float
    hardware: Hardware | None = None  # of its own; None: it shares the farm's machine
    state: str = PENDING
    detail: str = ""
    forgotten: bool = False
    _why: str = ""
    _timer: IDelayedCall | None = None  # of its boot, or its death
    _machine: IMachine = attrs.field(init=False)
    _starting: Deferred[None] | None = None
    _power_off: Flight[None] | None = None

    def __attrs_post_init__(self) -> None:
        self._machine = self._make_machine()

    def describe(self) -> Vm:
        """Return it as the protocol shows it."""
        return Vm(
            id=self.id,
            sandbox_id=self.sandbox_id,
            state=self.state,
            host=self._machine.host,
            port=self._machine.port,
            created_at=self.created_at,
            behaviour=self.behaviour,
            detail=self.detail,
            tags=dict(self.tags),
        )

    # The record, which outlives the farm

    async def save(self) -> None:
        """Write the record. :raise FailedPrecondition: it can't be written."""
        record = {
            "id": self.id,
            "behaviour": self.behaviour,
            "after": self.after,
            "created_at": self.created_at,
            "tags": dict(self.tags),
            "hardware": self.hardware,
            "sandbox_id": self.sandbox_id,
            "identity": encode(self.identity).decode() if self.identity is not None else None,
        }
        await run_in_thread(self.reactor, save, self.directory / RECORD, json.dumps(record))

    @classmethod
    def recovered(cls, reactor: IReactor, directory: Path, report: Report) -> SimulatedVm:
        """Return the VM of an earlier farm, with which it has ended, and end what is left of its containers.

        :raise ValueError, KeyError, TypeError, InvalidArgument: its record is unreadable.
        """
        record = json.loads((directory / RECORD).read_bytes())
        document = record.pop("identity")
        identity = decode(document.encode()) if document is not None else None
        vm = cls(reactor, directory, report, identity=identity, **record, state=STOPPED)
        if identity is not None:
            vm.state, vm.detail = ENDED, "it ended with the farm that held it"
        vm._machine.clear()
        return vm

    # Power

    def boot(self, delay: float) -> None:
        """Let it run after `delay` seconds, unless its behaviour is never to."""
        if self.behaviour != NEVER:
            self._timer = self.reactor.callLater(delay, self._run)

    def _run(self) -> None:
        self._timer = None
        self._starting = start(self._start())

    def _make_machine(self) -> IMachine:
        if self.hardware is not None:
            return NamespaceMachine(self.reactor, self.directory, self.id, self.hardware, self._ended)
        return SharedMachine(self.reactor, self.directory, self.tags.get(IMAGES_TAG) == LAYERS)

    async def _start(self) -> None:
        assert self.identity is not None
        try:
            await self._machine.turn_on(self.identity, self.behaviour)
        except Exception as error:
            await self._end(f"it could not start: {error}")
            return
        self.state = RUNNING
        self.report(RUNNING, self.describe())
        self._die_later()

    def _ended(self, why: str) -> None:
        """Record that its machine has ended by itself."""
        start(self._end(why))

    def _die_later(self) -> None:
        self._cancel_timer()
        if self.behaviour == DIES_AFTER:
            self._timer = self.reactor.callLater(self.after, self._die)

    def _die(self) -> None:
        self._timer = None
        start(self._end(self._why or f"it died after {self.after:g} s, as its behaviour says"))

    async def _end(self, why: str) -> None:
        await self.power_off()
        if self.state not in (ENDED, STOPPED) and not self.forgotten:
            self.state, self.detail = ENDED, why
            self.report(ENDED, self.describe())

    async def power_off(self) -> None:
        """Cut its power."""
        self._cancel_timer()
        if self._power_off is None:
            self._power_off = Flight(self._machine.turn_off())
        await self._power_off.join()

    async def halt(self) -> None:
        """Turn it off, so that it keeps its disk alone. Idempotent.

        :raise FailedPrecondition: it does not run."""
        if self.state not in (RUNNING, STOPPED):
            raise FailedPrecondition(f"VM {self.id} is {self.state} and can't be stopped")
        self.state, self.identity = STOPPED, None
        await self.save()
        await self.power_off()
        await run_in_thread(self.reactor, self._machine.forget)

    async def start_again(self, identity: Identity, behaviour: str, after: float) -> None:
        """Give it an identity, and have it pending, once it is stopped."""
        self.identity, self.behaviour, self.after = identity, behaviour, after
        await self.save()
        self.state, self._power_off, self._starting = PENDING, None, None
        self._machine = self._make_machine()

    async def destroy(self) -> None:
        """Cut its power, also while it starts; its end is not reported."""
        self.forgotten = True
        if self._starting is not None and not self._starting.called:
            self._starting.cancel()
        await self.power_off()

    def _cancel_timer(self) -> None:
        if self._timer is not None and self._timer.active():
            self._timer.cancel()
        self._timer = None

    # Behaviour

    async def behave(self, behaviour: str, after: float, why: str = "") -> None:
        """Change how it behaves from now on. :param why: it dies, for dies-after."""
        self.behaviour, self.after, self._why = behaviour, after, why
        await self.save()
        await self._machine.behave(behaviour)
        if self.state == RUNNING:
            self._die_later()
        elif self.state == PENDING and self._starting is None:
            if behaviour == NEVER:
                self._cancel_timer()
            elif self._timer is None:
                self._run()
