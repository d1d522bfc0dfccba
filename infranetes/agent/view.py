"""The view of one VM's containers, kept from its agent's Watch stream.

    Reach         what is true                                              goes to
    UNTRIED       no attempt has ended yet                                  LIVE TROUBLED
    LIVE          the stream is open and its snapshot was complete          TROUBLED
    TROUBLED      the stream was lost, or could not be had, not long ago    LIVE UNREACHABLE
    UNREACHABLE   the same for longer than `unknown_after`                  LIVE

Whoever lists containers takes them from here and waits for nobody but, once after each loss, a moment
for a stream that may be coming back.
"""

from __future__ import annotations

import enum
from typing import Any

import attrs
from twisted.internet.defer import CancelledError, Deferred, DeferredSemaphore, succeed
from twisted.logger import Logger
from zope.interface import Interface

from infranetes.agent.client import AgentClient

FIRST_DELAY = 0.1  # seconds between two attempts; doubles up to the last
LAST_DELAY = 15.0


class Reach(enum.Enum):
    """Whether the agent can be reached; see the table above."""

    UNTRIED = "untried"
    LIVE = "live"
    TROUBLED = "troubled"
    UNREACHABLE = "unreachable"


class IViewListener(Interface):
    """Who is told what the agent says, in the order in which it says it."""

    def asking() -> None:
        """A snapshot is asked for now: what is made from here on may be missing in it."""

    def snapshot(states: dict[str, Any]) -> None:
        """Every container (vmserver.ContainerState by id) as it is."""

    def changed(state: Any) -> None:
        """One container's new state."""

    def removed(container_id: str) -> None:
        """One container is no more."""

    def reach_changed(reach: Reach) -> None:
        """The agent can be reached, or no longer."""


@attrs.frozen
class ViewTimes:
    """Seconds."""

    attempt: float = 15.0  # connecting and the whole snapshot
    unknown_after: float = 5.0  # how long after a loss the last state still counts


class AgentView:
    """Keeps one Watch stream open until stopped.

    :param gate: bounds how many views make an attempt at once.
    """

    def __init__(
        self, clock: Any, client: AgentClient, listener: Any, gate: DeferredSemaphore, times: ViewTimes
    ) -> None:
        self.reach = Reach.UNTRIED
        self.trouble = ""  # why it can't be reached, for people
        self._clock = clock
        self._client = client
        self._listener = listener
        self._gate = gate
        self._times = times
        self._lost_at: float | None = None
        self._hopeful = True  # the next snapshot may be a moment away
        self._live = _Waiting()
        self._told = _Waiting()
        self._runner: Deferred[None] | None = None
        self._stopped = False
        self._overdue: Any = None  # the delayed call that makes TROUBLED UNREACHABLE
        self._log = Logger()

    @property
    def live(self) -> bool:
        """Whether what was last said is what is true now."""
        return self.reach is Reach.LIVE

    def start(self) -> None:
        """Begin. Twice is once."""
        if self._runner is None and not self._stopped:
            self._runner = Deferred.fromCoroutine(self._run())
            self._runner.addErrback(self._fell)

    def stop(self) -> None:
        """End the stream and tell nobody anything any more. Twice is once."""
        self._stopped = True
        if self._runner is not None:
            self._runner.cancel()
        if self._overdue is not None and self._overdue.active():
            self._overdue.cancel()
        self._settle()

    def when_live(self) -> Deferred[None]:
        """Fires once the view is LIVE, or stopped."""
        if self.live or self._stopped:
            return succeed(None)
        return self._live.wait()

    def when_told(self) -> Deferred[None]:
        """Fires once the view is LIVE, or the attempt that is under way has failed, or it is stopped."""
        if self.live or self._stopped:
            return succeed(None)
        return self._told.wait()

    @property
    def hopeful(self) -> bool:
        """Whether waiting a moment for `when_told` is worth it: nobody has waited in vain since the loss."""
        return self._hopeful and not self.live and not self._stopped

    def waited_in_vain(self) -> None:
        """Somebody gave the agent a moment; the next ones need not."""
        self._hopeful = False

    async def _run(self) -> None:
        delay = FIRST_DELAY
        while not self._stopped:
            try:
                await self._attempt()
                self.trouble = "it ended the stream"
            except CancelledError:
                if self._stopped:
                    return
                self.trouble = f"no complete snapshot within {self._times.attempt:.0f} s"
            except Exception as error:
                self.trouble = str(error)
            if self._stopped:
                return
            was_live = self.live
            self._in_trouble()
            if was_live:
                delay = FIRST_DELAY
            else:
                self._hopeful = False
                self._told.fire()
            pause: Deferred[None] = Deferred(lambda _: None)
            later = self._clock.callLater(delay, pause.callback, None)
            try:
                await pause
            finally:
                if later.active():
                    later.cancel()
            delay = min(delay * 2, LAST_DELAY)

    async def _attempt(self) -> None:
        """One stream, from its beginning to its end. The gate is held until the snapshot is complete."""
        await self._gate.acquire()
        holding = True
        stream = late = None
        try:
            if self._lost_at is None:
                self._lost_at = self._clock.seconds()
            stream = self._client.watch()
            late = self._clock.callLater(self._times.attempt, stream.cancel)
            self._listener.asking()
            states: dict[str, Any] = {}
            async for event in stream:
                if self._stopped:
                    return
                kind = event.WhichOneof("event")
                if kind == "synced" and holding:
                    late.cancel()
                    holding = False
                    self._gate.release()
                    self._listener.snapshot(states)
                    self._become_live()
                elif kind == "container" and holding:
                    states[event.container.id] = event.container
                elif kind == "container":
                    self._listener.changed(event.container)
                elif kind == "removed" and not holding:
                    self._listener.removed(event.removed)
                elif kind == "removed":
                    states.pop(event.removed, None)
        finally:
            if late is not None and late.active():
                late.cancel()
            if stream is not None:
                stream.cancel()
            if holding:
                self._gate.release()

    def _become_live(self) -> None:
        self._lost_at = None
        self._hopeful = True
        self.trouble = ""
        if self._overdue is not None and self._overdue.active():
            self._overdue.cancel()
        self._become(Reach.LIVE)
        self._settle()

    def _in_trouble(self) -> None:
        if self._lost_at is None:  # it was live until now
            self._lost_at = self._clock.seconds()
        if self.reach is Reach.UNREACHABLE:
            return
        if self.reach is not Reach.TROUBLED:
            self._become(Reach.TROUBLED)
            left = self._lost_at + self._times.unknown_after - self._clock.seconds()
            self._overdue = self._clock.callLater(max(left, 0), self._become, Reach.UNREACHABLE)

    def _become(self, reach: Reach) -> None:
        if reach is not self.reach:
            self.reach = reach
            self._listener.reach_changed(reach)

    def _settle(self) -> None:
        self._live.fire()
        self._told.fire()

    def _fell(self, failure: Any) -> None:
        if not failure.check(CancelledError):
            self._log.failure("the view of an agent failed", failure=failure)


class _Waiting:
    """Who waits for the next time that something happens."""

    def __init__(self) -> None:
        self._waiting: list[Deferred[None]] = []

    def wait(self) -> Deferred[None]:
        one: Deferred[None] = Deferred(self._waiting.remove)
        self._waiting.append(one)
        return one

    def fire(self) -> None:
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            one.callback(None)
