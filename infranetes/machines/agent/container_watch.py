# SPDX-License-Identifier: Apache-2.0
"""The Watch stream of one VM's agent, which reports the states of its containers.

    Reach         what is true                                              goes to
    UNTRIED       no attempt has ended yet                                  LIVE TROUBLED
    LIVE          the stream is open and its snapshot was complete          TROUBLED
    TROUBLED      the stream was lost or could not be opened, not long ago  LIVE UNREACHABLE
                  (or the agent sent more than an honest agent does)
    UNREACHABLE   the same for longer than `unreachable_after`              LIVE SILENT
    SILENT        the same for longer than `unknown_after`                  LIVE
    ASLEEP        the VM sleeps, and nobody asks it                         UNTRIED

Until a stream is SILENT, lists show what it reported last, without asking the agent: kubelet kills containers
whose state is unknown, and a container that gets little CPU time, or whose network fails for a moment, has
not ended. Only once after each loss do lists wait a moment for the streams that may come back.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Protocol

import attrs
from twisted.internet.defer import CancelledError, Deferred, DeferredSemaphore, succeed
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import Interface

from infranetes.machines.agent.limits import CHANGES, CHANGES_PER_SECOND, CONTAINERS
from infranetes.machines.interface import EventStream
from infranetes_common.concurrency import Notifier, backoff, sleep, start
from infranetes_common.errors import ResourceExhausted
from infranetes_common.wire import vmserver
from txgrpc import Code, GrpcError
from txgrpc.limits import Allowance

FIRST_DELAY = 0.1  # seconds between two attempts; doubles up to the last
LAST_DELAY = 15.0
REFUSED_DELAY = 5.0  # the shortest delay, in seconds, after an agent's messages were refused
_REFUSED = (Code.RESOURCE_EXHAUSTED, Code.INVALID_ARGUMENT, Code.INTERNAL)

_log = Logger()


class Reach(enum.Enum):
    """Whether the agent can be reached; see the table above."""

    UNTRIED = "untried"
    LIVE = "live"
    TROUBLED = "troubled"
    UNREACHABLE = "unreachable"
    SILENT = "silent"
    ASLEEP = "asleep"


class TooMuch(ResourceExhausted):
    """The agent sends more than an honest agent does."""


class IContainerListener(Interface):
    """A listener to the agent's reports, called in their order."""

    def snapshot_requested() -> None:
        """Expect a snapshot, which may lack containers that are made from now on."""

    def snapshot(states: dict[str, vmserver.ContainerState]) -> None:
        """Take a snapshot: the states of all containers, by id."""

    def changed(state: vmserver.ContainerState) -> None:
        """Take the new state of one container."""

    def removed(container_id: str) -> None:
        """Learn that one container is gone."""

    def interrupted(interruption: vmserver.Interruption) -> None:
        """Learn that the cloud will take the VM away. Called again after each snapshot."""

    def reach_changed(reach: Reach) -> None:
        """Learn that the agent's reach has changed."""


class WatchedAgent(Protocol):
    """The part of the agent's client that a watch needs."""

    def watch(self) -> EventStream[vmserver.WatchEvent]:
        """Open the Watch stream."""


@attrs.frozen
class WatchTimes:
    """Time limits of a watch, in seconds."""

    attempt: float = 15.0  # for connecting and the whole snapshot
    unreachable_after: float = 5.0  # how long after a loss callers may wait for the agent
    unknown_after: float = 300.0  # how long after a loss the last state still counts


class ContainerWatch:
    """Keeps one agent's Watch stream open until stopped.

    :param gate: limits how many streams are being opened at once.
    :ivar reach: whether the agent can be reached.
    :ivar trouble: why it can't be reached, as a message; "": it can be.
    """

    def __init__(
        self,
        clock: IReactorTime,
        client: WatchedAgent,
        listener: IContainerListener,
        gate: DeferredSemaphore,
        times: WatchTimes,
    ) -> None:
        self.reach = Reach.UNTRIED
        self.trouble = ""
        self._clock = clock
        self._client = client
        self._listener = listener
        self._gate = gate
        self._times = times
        self._lost_at: float | None = None
        self._worth_waiting = True
        self._live = Notifier()
        self._attempted = Notifier()
        self._runner: Deferred[None] | None = None
        self._stopped = False
        self._paused = False
        self._changes = Allowance(CHANGES, CHANGES_PER_SECOND, clock.seconds())
        self._overdue: IDelayedCall | None = None  # turns TROUBLED into UNREACHABLE, then SILENT

    @property
    def live(self) -> bool:
        """Whether the agent's last report is up to date."""
        return self.reach is Reach.LIVE

    @property
    def unreachable(self) -> bool:
        """Whether callers should not wait for the agent."""
        return self.reach in (Reach.UNREACHABLE, Reach.SILENT, Reach.ASLEEP)

    def start(self) -> None:
        """Open the stream, and reopen it after each loss. Idempotent."""
        if self._runner is None and not self._over:
            self._runner = start(self._run())
            self._runner.addErrback(_unexpected)

    @property
    def _over(self) -> bool:
        return self._stopped or self._paused

    def pause(self) -> None:
        """End the stream, as the VM sleeps: what was reported last counts. Idempotent."""
        if self._over:
            return
        self._paused = True
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.cancel()
        self._cancel_overdue()
        self._lost_at = None
        self.trouble = ""
        self._become(Reach.ASLEEP)
        self._attempted.notify()

    def resume(self) -> None:
        """Open the stream again, as the VM is awake. Idempotent."""
        if self._paused and not self._stopped:
            self._paused = False
            self._worth_waiting = True
            self._become(Reach.UNTRIED)
            self.start()

    def stop(self) -> None:
        """End the stream. The listener is not called any more. Idempotent."""
        self._stopped = True
        if self._runner is not None:
            self._runner.cancel()
        self._cancel_overdue()
        self._notify()

    def when_live(self) -> Deferred[None]:
        """Return a Deferred that fires once the stream is LIVE or stopped."""
        if self.live or self._stopped:
            return succeed(None)
        return self._live.wait()

    def when_attempted(self) -> Deferred[None]:
        """Return a Deferred that fires once the stream is LIVE or stopped, or this attempt has failed."""
        if self.live or self._stopped:
            return succeed(None)
        return self._attempted.wait()

    @property
    def worth_waiting(self) -> bool:
        """Whether the next snapshot may arrive soon: no caller has waited in vain since the loss."""
        return self._worth_waiting and not self.live and not self._over

    def waited_in_vain(self) -> None:
        """Record that a caller has waited in vain, so that the next ones do not wait."""
        self._worth_waiting = False

    async def _run(self) -> None:
        pauses = backoff(FIRST_DELAY, LAST_DELAY)
        while not self._over:
            refused = False
            try:
                await self._attempt()
                self.trouble = "it ended the stream"
            except CancelledError:
                if self._over:
                    return
                self.trouble = f"no complete snapshot within {self._times.attempt:.0f} s"
            except Exception as error:
                self.trouble = str(error)
                refused = isinstance(error, TooMuch) or (
                    isinstance(error, GrpcError) and error.code in _REFUSED
                )
            if self._over:
                return
            was_live = self.live
            self._lost()
            if was_live and not refused:
                pauses = backoff(FIRST_DELAY, LAST_DELAY)
            else:
                self._worth_waiting = False
                self._attempted.notify()
            pause = next(pauses)
            if refused and pause < REFUSED_DELAY:
                pauses = backoff(REFUSED_DELAY, LAST_DELAY)
                pause = next(pauses)
            await sleep(self._clock, pause)

    async def _attempt(self) -> None:
        """Run one stream from its beginning to its end, holding the gate until the snapshot is complete."""
        await self._gate.acquire()
        snapshot: dict[str, vmserver.ContainerState] | None = {}  # None once it is complete
        stream = late = None
        try:
            if self._lost_at is None:
                self._lost_at = self._clock.seconds()
            stream = self._client.watch()
            late = self._clock.callLater(self._times.attempt, stream.cancel)
            self._listener.snapshot_requested()
            async for event in stream:
                if self._over:
                    return
                if not self._changes.spend(self._clock.seconds()):
                    raise TooMuch("its agent reported more changes than its containers can have")
                if snapshot is None:
                    self._tell(event)
                elif event.WhichOneof("event") == "synced":
                    late.cancel()
                    states, snapshot = snapshot, None
                    self._gate.release()
                    self._listener.snapshot(states)
                    self._become_live()
                else:
                    _add(snapshot, event)
        finally:
            if late is not None and late.active():
                late.cancel()
            if stream is not None:
                stream.cancel()
            if snapshot is not None:
                self._gate.release()

    def _tell(self, event: vmserver.WatchEvent) -> None:
        kind = event.WhichOneof("event")
        if kind == "container":
            self._listener.changed(event.container)
        elif kind == "removed":
            self._listener.removed(event.removed)
        elif kind == "interruption":
            self._listener.interrupted(event.interruption)

    def _become_live(self) -> None:
        self._lost_at = None
        self._worth_waiting = True
        self.trouble = ""
        self._cancel_overdue()
        self._become(Reach.LIVE)
        self._notify()

    def _lost(self) -> None:
        if self._lost_at is None:  # it was live until now
            self._lost_at = self._clock.seconds()
        if self.unreachable or self.reach is Reach.TROUBLED:
            return
        self._become(Reach.TROUBLED)
        self._become_after(min(self._times.unreachable_after, self._times.unknown_after), self._give_up)

    def _give_up(self) -> None:
        self._become(Reach.UNREACHABLE)
        self._become_after(self._times.unknown_after, self._become, Reach.SILENT)

    def _become_after(self, seconds: float, become: Callable[..., None], *arguments: Reach) -> None:
        """Call `become` `seconds` after the loss, unless the agent is back by then."""
        assert self._lost_at is not None
        left = self._lost_at + seconds - self._clock.seconds()
        self._overdue = self._clock.callLater(max(left, 0), become, *arguments)

    def _become(self, reach: Reach) -> None:
        if reach is not self.reach:
            self.reach = reach
            self._listener.reach_changed(reach)

    def _cancel_overdue(self) -> None:
        if self._overdue is not None and self._overdue.active():
            self._overdue.cancel()

    def _notify(self) -> None:
        self._live.notify()
        self._attempted.notify()


def _add(snapshot: dict[str, vmserver.ContainerState], event: vmserver.WatchEvent) -> None:
    """Apply an event to the snapshot that it is part of. :raise TooMuch: it has too many containers."""
    kind = event.WhichOneof("event")
    if kind == "container":
        snapshot[event.container.id] = event.container
        if len(snapshot) > CONTAINERS:
            raise TooMuch(f"its agent has over {CONTAINERS} containers")
    elif kind == "removed":
        snapshot.pop(event.removed, None)


def _unexpected(failure: Failure) -> None:
    if not failure.check(CancelledError):
        _log.failure("the watch of an agent's containers failed", failure=failure)
