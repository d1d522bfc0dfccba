# SPDX-License-Identifier: Apache-2.0
"""Calls to a cloud: in threads, with deadlines, rate limits, a circuit breaker and retries."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from twisted.internet.defer import CancelledError, Deferred, DeferredSemaphore, TimeoutError, gatherResults
from twisted.internet.threads import deferToThreadPool
from twisted.logger import Logger
from twisted.python.threadpool import ThreadPool

from infranetes.observer import CANCELLED, NULL_OBSERVER, OK, Observer, reason_of
from infranetes.providers.cloud.calls.errors import classify
from infranetes.providers.cloud.calls.throttle import CircuitBreaker, RateLimit
from infranetes.providers.cloud.calls.turns import CallQueue
from infranetes.providers.cloud.interface import REFUSALS, Action, Cloud, CloudError, D, ErrorKind, Rate
from infranetes.providers.cloud.settings import CloudSettings
from infranetes.tracing.spans import Kind, note, step
from infranetes_common.concurrency import backoff, run_in_thread, sleep
from infranetes_common.errors import InfranetesError
from infranetes_common.reactors import IReactor

T = TypeVar("T")

RETRIED = (ErrorKind.THROTTLED, ErrorKind.TRANSIENT)
# The outcome of a call that was not made: it got no turn in time, or the circuit is open.
HELD_BACK = "held_back"
BY_THE_WAY = "by the way: "  # the prefix of circuits for calls that nothing depends on
_SILENT, _UNASKED = "does not answer", "can't be called without credentials"
STOP_SECONDS = 5.0
IDLE_SECONDS = 600.0  # after which a driver that no call needed is closed, but for the last one
GRACE_SECONDS = 5.0  # on top of the driver's own deadline, which a slowly trickling answer evades

_log = Logger()


class _DaemonThreadPool(ThreadPool):
    """Threads that do not hold up the end of the process."""

    @staticmethod
    def threadFactory(  # type: ignore[override]
        *args: Any,  # Any: passed on as `ThreadPool` gives them
        **kwargs: Any,  # Any: likewise
    ) -> threading.Thread:
        return threading.Thread(*args, **kwargs, daemon=True)


class Calls(Generic[D]):
    """The caller of one provider's cloud.

    :param name: the provider's, for people and the observer; "": the cloud's.
    :ivar made: how many calls were made. :ivar failed: how many of these failed.
    :ivar throttled: how many of these were refused because of their rate.
    """

    def __init__(
        self,
        reactor: IReactor,
        cloud: Cloud[D],
        settings: CloudSettings,
        observer: Observer = NULL_OBSERVER,
        name: str = "",
    ) -> None:
        self._reactor = reactor
        self._name = name or cloud.name
        self._cloud = cloud
        self._settings = settings
        self._observer = observer
        self._pool = _DaemonThreadPool(settings.threads, settings.threads, f"infranetes.{self._name}")
        self._free_threads = DeferredSemaphore(settings.threads)
        self._drivers: set[D] = set()
        # Those that no call uses, the one that was used last at the end: so there are as many drivers, each
        # with a session of its own, as calls at a time, not as threads. Appending and popping need no lock.
        self._idle_drivers: list[tuple[D, float]] = []  # each with when it was used
        self._stopped = False
        self._turns: dict[Action, CallQueue] = {}
        # One for each kind of call: launches may fail while everything else works.
        self._circuits: dict[str, CircuitBreaker] = {}
        self.made = 0
        self.failed = 0
        self.throttled = 0
        observer.cloud_known(self._name, _outcomes(), _reasons())

    async def start(self) -> None:
        """Start all threads now: starting one takes a moment when the process is busy."""
        if not self._pool.started:
            await run_in_thread(self._reactor, self._pool.start)

    async def stop(self) -> None:
        """Make no more calls, and wait a moment for those under way. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        if not self._pool.started:
            return
        threads = self._reactor.getThreadPool()
        ended: Deferred[None] = deferToThreadPool(self._reactor, threads, self._pool.stop)
        try:
            await ended.addTimeout(STOP_SECONDS, self._reactor)
        except TimeoutError:
            _log.warn("{cloud}: calls were under way when the provider stopped", cloud=self._name)
        closing = gatherResults(
            [
                deferToThreadPool(self._reactor, threads, self._cloud._thd_disconnect, driver)
                for driver in self._drivers
            ],
            consumeErrors=True,
        )
        self._drivers.clear()
        try:
            await closing.addTimeout(STOP_SECONDS, self._reactor)
        except Exception as error:
            _log.debug("{cloud}: a connection did not close: {error}", cloud=self._name, error=error)

    @property
    def is_open(self) -> bool:
        """Whether a circuit is open: some or all kinds of calls fail, and are made rarely."""
        return bool(self._open())

    @property
    def state(self) -> str:
        """Whether the cloud answers, for people."""
        reasons = self._open()
        if not reasons:
            return "answering"
        return "not answering" if _SILENT in reasons else "not called, without credentials"

    def _open(self) -> set[str]:
        """Return the reasons why circuits are open."""
        circuits = [each for name, each in self._circuits.items() if not name.startswith(BY_THE_WAY)]
        return {each.why for each in circuits if each.is_open}

    async def call(
        self,
        what: str,
        work: Callable[[D], T],
        seconds: float | None = None,
        circuit: str = "",
        action: Action = Action.LOOK,
    ) -> T:
        """Return what `work(driver)` returns, run in a thread.

        :param what: for people. :param seconds: including retries; None: as configured.
        :param circuit: the name of the circuit breaker that counts this call.
        :param action: the kind of call that it is to the cloud, which limits the rate of each kind.
        :raise CloudError: it failed, and trying again did not help or would not.
        """
        deadline = self._reactor.seconds() + (seconds or self._settings.retry_seconds)
        about = {"infranetes.cloud.call": what}
        with step(f"{self._name}: {action.value}", Kind.CLIENT, about):
            try:
                return await self._call(what, work, deadline, circuit, action)
            except CloudError as error:
                note({"error.type": error.kind.value})
                raise

    async def _call(
        self, what: str, work: Callable[[D], T], deadline: float, circuit: str, action: Action
    ) -> T:
        """Make the call, and again while it may help, until `deadline`."""
        breaker = self._circuits.setdefault(circuit, CircuitBreaker(self._reactor.seconds))
        pauses = backoff(self._settings.retry_first, self._settings.retry_most, jitter=0.5)
        turns = self._turns_of(action)
        attempt, again = 0, False
        while True:
            attempt += 1
            asked = self._reactor.seconds()
            try:
                await self._wait_for_turn(what, deadline, breaker, turns, again)
            except CloudError:
                self._tell(action, HELD_BACK, self._reactor.seconds() - asked, 0.0)
                raise
            waited = self._reactor.seconds() - asked
            try:
                result = await self._observed(action, waited, work)
            except CloudError as error:
                self._record_failure(what, error, breaker, turns)
                if error.kind not in RETRIED:
                    raise
                again = error.kind is ErrorKind.THROTTLED
                # The rate limit makes all calls of this kind pause, and this one is made first.
                pause = 0.0 if again else max(next(pauses), error.retry_after)
                if self._reactor.seconds() + pause > deadline:
                    raise CloudError(
                        error.kind,
                        f"{what}: {error} (tried {attempt} times)",
                        error.retry_after,
                        unasked=error.unasked,
                    ) from error
                self.retried(action, error.kind)
            except BaseException:
                breaker.abandoned()
                raise
            else:
                breaker.succeeded()
                return result
            await sleep(self._reactor, pause)

    def retried(self, action: Action, reason: ErrorKind) -> None:
        """Note that a call is repeated, or replaced by another one."""
        self._observer.cloud_retried(self._name, _word(action), _word(reason))

    async def _observed(self, action: Action, waited: float, work: Callable[[D], T]) -> T:
        """Make one attempt, and tell the observer how it ended."""
        began = self._reactor.seconds()
        try:
            result = await self._attempt(work)
        except BaseException as error:
            outcome = _word(error.kind) if isinstance(error, CloudError) else reason_of(error)
            self._tell(action, outcome, waited, self._reactor.seconds() - began)
            raise
        self._tell(action, OK, waited, self._reactor.seconds() - began)
        return result

    def _tell(self, action: Action, outcome: str, waited: float, seconds: float) -> None:
        self._observer.cloud_called(self._name, _word(action), outcome, waited, seconds)

    def _turns_of(self, action: Action) -> CallQueue:
        if action not in self._turns:
            configured = self._settings.calls_per_second
            rate = Rate(configured, configured * 2) if configured else self._cloud.rates[action]
            limit = RateLimit(self._reactor.seconds, rate.per_second, rate.burst)
            self._turns[action] = CallQueue(self._reactor, limit)
        return self._turns[action]

    def slowed(self) -> dict[Action, float]:
        """Return the current rate, in calls per second, of each action that the cloud throttles."""
        limits = {action: turns.limit for action, turns in self._turns.items()}
        return {action: limit.current for action, limit in limits.items() if limit.current < limit.rate}

    async def _wait_for_turn(
        self, what: str, deadline: float, breaker: CircuitBreaker, turns: CallQueue, again: bool
    ) -> None:
        """Wait until the circuit breaker and the rate limit let a call through."""
        while True:
            if self._stopped:
                raise CloudError(ErrorKind.TRANSIENT, f"{what}: the provider is stopped")
            wait = breaker.wait()
            if not wait:
                break
            if self._reactor.seconds() + wait > deadline:
                raise CloudError(
                    ErrorKind.TRANSIENT,
                    f"{what}: {self._cloud.location} {breaker.why}; it is tried again in {wait:.0f} s",
                    wait,
                    unasked=breaker.why == _UNASKED,
                )
            await self._sleep(wait, breaker)
        left = deadline - self._reactor.seconds()
        expected = turns.expected(again=again)
        try:
            if expected > left:
                raise TimeoutError
            await turns.take(again=again).addTimeout(max(left, 0.0), self._reactor)
        except TimeoutError:
            breaker.abandoned()
            raise CloudError(
                ErrorKind.THROTTLED, f"{what}: {self._cloud.location} throttles the node's requests", expected
            ) from None
        except CancelledError:
            breaker.abandoned()
            raise

    async def _sleep(self, seconds: float, breaker: CircuitBreaker) -> None:
        try:
            await sleep(self._reactor, seconds)
        except CancelledError:
            breaker.abandoned()
            raise

    async def _attempt(self, work: Callable[[D], T]) -> T:
        await self._free_threads.acquire()
        try:
            if self._stopped:
                raise CloudError(ErrorKind.TRANSIENT, "the provider is stopped")
            self.made += 1
            running: Deferred[T] = deferToThreadPool(self._reactor, self._pool, self._thd_run, work)
            try:
                return await running.addTimeout(self._settings.call_seconds + GRACE_SECONDS, self._reactor)
            except TimeoutError:
                raise CloudError(ErrorKind.TRANSIENT, "no answer in time") from None
        finally:
            self._free_threads.release()

    def _thd_run(self, work: Callable[[D], T]) -> T:
        driver: D | None = None
        try:
            driver = self._thd_driver()
            result = work(driver)
        except InfranetesError:
            self._thd_give_back(driver)
            raise
        except Exception as error:
            cloud_error = error if isinstance(error, CloudError) else self._cloud.classify(error)
            cloud_error = cloud_error or classify(error)
            if cloud_error.kind in (ErrorKind.TRANSIENT, ErrorKind.CREDENTIALS, ErrorKind.UNEXPECTED):
                self._thd_drop(driver)  # the fault may be in its connection or credentials
            else:
                self._thd_give_back(driver)
            if cloud_error.kind is ErrorKind.UNEXPECTED:
                _log.failure("{cloud}: a call failed unexpectedly", cloud=self._name)
            raise cloud_error from error
        self._thd_give_back(driver)
        return result

    def _thd_driver(self) -> D:
        """Return a driver that no other call uses: the idle one that was used last, or a new one."""
        while True:
            try:
                driver, _ = self._idle_drivers.pop()
            except IndexError:
                break
            is_current = False
            try:
                is_current = self._cloud._thd_is_current(driver)
            finally:
                if not is_current:
                    self._thd_drop(driver)
            if is_current:
                return driver
        driver = self._cloud._thd_connect(self._settings.call_seconds)
        self._drivers.add(driver)
        return driver

    def _thd_give_back(self, driver: D | None) -> None:
        """Keep a driver for the next call, and close one that was not needed for long: a session of its own
        counts at the cloud."""
        if driver is None:
            return
        now = self._reactor.seconds()
        self._idle_drivers.append((driver, now))
        if len(self._idle_drivers) == 1 or now - self._idle_drivers[0][1] < IDLE_SECONDS:
            return
        try:
            oldest, used = self._idle_drivers.pop(0)
        except IndexError:
            return  # other calls have taken all of them
        if now - used < IDLE_SECONDS:
            self._idle_drivers.append((oldest, used))  # another thread has closed the one that was seen
        else:
            self._thd_drop(oldest)

    def _thd_drop(self, driver: D | None) -> None:
        if driver is not None:
            self._drivers.discard(driver)
            self._cloud._thd_disconnect(driver)

    def _record_failure(
        self, what: str, error: CloudError, breaker: CircuitBreaker, turns: CallQueue
    ) -> None:
        self.failed += 1
        if error.kind is ErrorKind.THROTTLED:
            self.throttled += 1
            turns.limit.throttled(error.retry_after)
        if error.kind is not ErrorKind.TRANSIENT:
            breaker.succeeded()
            return
        was_open = breaker.is_open
        breaker.failed(_UNASKED if error.unasked else _SILENT)
        if breaker.is_open and not was_open:
            _log.warn(
                "{cloud} {why} ({what}: {error}); it is tried again now and then",
                cloud=self._cloud.location,
                why=breaker.why,
                what=what,
                error=error,
            )


def _outcomes() -> Iterator[tuple[str, str]]:
    """Yield what an observer may be told of calls: their actions and outcomes."""
    for action in Action:
        for outcome in (OK, HELD_BACK, CANCELLED, *map(_word, ErrorKind)):
            yield _word(action), outcome


def _reasons() -> Iterator[tuple[str, str]]:
    """Yield what an observer may be told of repeated calls: their actions and the reasons."""
    for action in Action:
        for kind in (*RETRIED, *(REFUSALS if action is Action.LAUNCH else ())):
            yield _word(action), _word(kind)


def _word(of: Action | ErrorKind) -> str:
    return of.name.lower()
