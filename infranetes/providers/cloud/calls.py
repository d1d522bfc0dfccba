"""Calls to a cloud: in threads of their own, with deadlines, at a bearable rate, again when that helps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from twisted.internet.defer import CancelledError, Deferred, DeferredSemaphore, TimeoutError, gatherResults
from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThreadPool
from twisted.logger import Logger
from twisted.python.threadpool import ThreadPool

from infranetes.providers.cloud.interface import CloudError, ICloud, Trouble
from infranetes.providers.cloud.judge import judge
from infranetes.providers.cloud.limits import Circuit, RateLimit, backoff
from infranetes.providers.cloud.settings import CloudSettings
from infranetes.threads import in_thread
from infranetes_common.errors import InfranetesError

T = TypeVar("T")

RETRIED = (Trouble.THROTTLED, Trouble.PASSING)
STOP_SECONDS = 5.0
GRACE_SECONDS = 5.0  # beyond the driver's own deadline, which a trickling answer gets around

_log = Logger()


class _Pool(ThreadPool):
    """Threads that do not hold up the end of the process."""

    @staticmethod
    def threadFactory(*args: Any, **kwargs: Any) -> threading.Thread:  # type: ignore[override]
        return threading.Thread(*args, **kwargs, daemon=True)


class Calls:
    """How one provider calls its cloud."""

    def __init__(self, reactor: Any, cloud: ICloud, settings: CloudSettings) -> None:
        self._reactor = reactor
        self._cloud = cloud
        self._settings = settings
        self._pool = _Pool(settings.threads, settings.threads, f"infranetes.{cloud.name}")
        self._turns = DeferredSemaphore(settings.threads)
        self._mine = threading.local()  # each thread's driver
        self._drivers: set[Any] = set()
        self._stopped = False
        self.limit = RateLimit(reactor.seconds, settings.calls_per_second, settings.calls_per_second * 2)
        self._circuits: dict[str, Circuit] = {}  # launches may fail where all else works
        self.made = 0
        self.failed = 0

    async def start(self) -> None:
        """Have threads. All of them: to start one takes a moment while others compute."""
        if not self._pool.started:
            await in_thread(self._reactor, self._pool.start)

    async def stop(self) -> None:
        """Make no more calls, and wait a moment for those under way. Twice is once."""
        if self._stopped:
            return
        self._stopped = True
        if not self._pool.started:
            return
        ended: Deferred[None] = deferToThreadPool(
            self._reactor, self._reactor.getThreadPool(), self._pool.stop
        )
        try:
            await ended.addTimeout(STOP_SECONDS, self._reactor)
        except TimeoutError:
            _log.warn("{cloud}: calls were under way when the provider stopped", cloud=self._cloud.name)
        threads = self._reactor.getThreadPool()
        closing = gatherResults(
            [deferToThreadPool(self._reactor, threads, _thd_disconnect, each) for each in self._drivers],
            consumeErrors=True,
        )
        self._drivers.clear()
        try:
            await closing.addTimeout(STOP_SECONDS, self._reactor)
        except Exception as error:
            _log.debug("{cloud}: a connection did not close: {error}", cloud=self._cloud.name, error=error)

    @property
    def is_open(self) -> bool:
        """Whether the cloud does not answer, or not all of what it is asked."""
        return any(circuit.is_open for circuit in self._circuits.values())

    async def call(
        self, what: str, work: Callable[[Any], T], seconds: float | None = None, kind: str = ""
    ) -> T:
        """What `work(driver)` returns, run in a thread.

        :param what: for people. :param seconds: with all retries; the configuration's unless given.
        :param kind: calls of a kind have a circuit of their own.
        :raise CloudError: it failed, and trying again did not help or does not.
        """
        deadline = self._reactor.seconds() + (seconds or self._settings.retry_seconds)
        circuit = self._circuits.setdefault(kind, Circuit(self._reactor.seconds))
        attempt = 0
        while True:
            await self._turn(what, deadline, circuit)
            try:
                result = await self._once(work)
            except CloudError as error:
                self._heard(what, error, circuit)
                if error.trouble not in RETRIED:
                    raise
                pause = backoff(attempt, self._settings.retry_first, self._settings.retry_most)
                pause = max(pause, error.retry_after)
                if self._reactor.seconds() + pause > deadline:
                    raise CloudError(
                        error.trouble, f"{what}: {error} (tried {attempt + 1} times)", error.retry_after
                    ) from error
            except BaseException:
                circuit.abandoned()
                raise
            else:
                circuit.succeeded()
                self.limit.served()
                return result
            attempt += 1
            await deferLater(self._reactor, pause)

    async def _turn(self, what: str, deadline: float, circuit: Circuit) -> None:
        """Until the circuit and the rate let a call through."""
        while True:
            if self._stopped:
                raise CloudError(Trouble.PASSING, f"{what}: the provider is stopped")
            wait = circuit.wait()
            if not wait:
                break
            if self._reactor.seconds() + wait > deadline:
                raise CloudError(
                    Trouble.PASSING,
                    f"{what}: {self._cloud.place} does not answer; asked again in {wait:.0f} s",
                    wait,
                )
            await self._sleep(wait, circuit)
        wait = self.limit.reserve()
        if wait:
            if self._reactor.seconds() + wait > deadline:
                circuit.abandoned()
                raise CloudError(
                    Trouble.THROTTLED, f"{what}: {self._cloud.place} wants to be asked less often", wait
                )
            await self._sleep(wait, circuit)

    async def _sleep(self, seconds: float, circuit: Circuit) -> None:
        try:
            await deferLater(self._reactor, seconds)
        except CancelledError:
            circuit.abandoned()
            raise

    async def _once(self, work: Callable[[Any], T]) -> T:
        await self._turns.acquire()
        try:
            if self._stopped:
                raise CloudError(Trouble.PASSING, "the provider is stopped")
            self.made += 1
            running: Deferred[T] = deferToThreadPool(self._reactor, self._pool, self._thd_run, work)
            try:
                return await running.addTimeout(self._settings.call_seconds + GRACE_SECONDS, self._reactor)
            except TimeoutError:
                raise CloudError(Trouble.PASSING, "no answer in time") from None
        finally:
            self._turns.release()

    def _thd_run(self, work: Callable[[Any], T]) -> T:
        try:
            return work(self._thd_driver())
        except InfranetesError:
            raise  # already in our own words
        except Exception as error:
            found = (self._cloud.judge(error) if not isinstance(error, CloudError) else error) or judge(error)
            if found.trouble in (Trouble.PASSING, Trouble.CREDENTIALS, Trouble.BROKEN):
                self._thd_drop()  # its connection, or its credentials, may be what is wrong
            if found.trouble is Trouble.BROKEN:
                _log.failure("{cloud}: a call failed unexpectedly", cloud=self._cloud.name)
            raise found from error

    def _thd_driver(self) -> Any:
        driver = getattr(self._mine, "driver", None)
        if driver is not None and not self._cloud._thd_is_current(driver):
            self._thd_drop()
            driver = None
        if driver is None:
            driver = self._mine.driver = self._cloud._thd_connect(self._settings.call_seconds)
            self._drivers.add(driver)
        return driver

    def _thd_drop(self) -> None:
        driver, self._mine.driver = getattr(self._mine, "driver", None), None
        if driver is not None:
            self._drivers.discard(driver)
            _thd_disconnect(driver)

    def _heard(self, what: str, error: CloudError, circuit: Circuit) -> None:
        self.failed += 1
        if error.trouble is Trouble.THROTTLED:
            self.limit.throttled(error.retry_after)
        if error.trouble is not Trouble.PASSING:
            circuit.succeeded()
            return
        was_open = circuit.is_open
        circuit.failed()
        if circuit.is_open and not was_open:
            _log.warn(
                "{cloud} does not answer ({what}: {error}); it is asked again now and then",
                cloud=self._cloud.place,
                what=what,
                error=error,
            )


def _thd_disconnect(driver: Any) -> None:
    """Close the sockets that a libcloud driver keeps; it has no call for that. Ours may have one."""
    close = getattr(driver, "_thd_close", None)
    if close is not None:
        close()
        return
    session = getattr(getattr(driver.connection, "connection", None), "session", None)
    if session is not None:
        session.close()
