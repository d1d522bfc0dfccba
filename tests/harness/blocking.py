"""Finds callbacks that keep the reactor from its work for too long.

A clock that only runs while the reactor's thread is itself to blame is read before and after each
callback. It stands still while the thread

- waits for a processor that others have (`run_delay` in Linux' Documentation/scheduler/sched-stats:
  the second field of schedstat, nanoseconds),
- waits for garbage to be collected, by whichever thread: all wait then, and a test process has a heap of its
  own making,
- runs the test's own methods and clean-ups.

Sleeping, waiting for a lock or a disk, and computing all count. When that is over the limit, what the
machine's noise explains is let go (see `noise`), and so is the share of it in which the thread was
seen to be in code of the tests, not of the product: a test may wait as it likes.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import math
import os
import threading
import time
import types
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.defer import Deferred
from twisted.trial.unittest import TestCase

from tests.harness.noise import Noise
from tests.harness.stacks import ROOT, SHOWN, Call, Stacks

TICK = 0.02  # seconds between two looks at what the reactor is doing
HERE = Path(__file__).resolve()


@attrs.frozen
class Seen:
    """What the thread was at, in the middle of a callback."""

    function: str  # the innermost of the project's own, by module and qualified name
    in_tests: bool  # that is a test's, not the product's
    asleep: bool  # on its own account, see Noise.asleep
    stack: str  # the calls that led there, the latest last


@attrs.frozen
class Blocked:
    """One callback that took too long."""

    what: str  # the callback
    millis: float
    seen: Seen | None = None

    def __str__(self) -> str:
        words = f"{self.what} blocked the reactor for {self.millis:.0f} ms"
        return words if self.seen is None else f"{words} in {self.seen.function}\n{self.seen.stack}"


def _open_schedstat() -> int | None:
    try:
        return os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:  # a kernel without it: wall time alone
        return None


def describe(function: Callable[..., Any]) -> str:
    """A callback's name for people: module and qualified name; what a partial or a method wraps."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    name = getattr(function, "__qualname__", None) or repr(function)
    owner = getattr(function, "__self__", None)
    if owner is not None and not isinstance(owner, type | types.ModuleType):
        name = f"{type(owner).__qualname__}.{getattr(function, '__name__', name)}"
    return f"{getattr(function, '__module__', None) or '?'}.{name}"


class Guard:
    """Watches one reactor. `install` once, from the reactor's thread, before anything uses it.

    :param limit: milliseconds that a callback may take; 0: as long as it likes.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit or math.inf
        self.found: list[Blocked] = []
        self._schedstat = _open_schedstat()
        # Nanoseconds that do not count, see the module's words; each has one thread that writes it.
        self._own_code = 0  # the reactor's
        self._collected = 0  # the one that collects garbage
        self._collecting: int | None = None  # what the clock read when the collection began
        self._reactor_thread = threading.get_ident()
        self._running: int | None = None  # when the callback began
        self._looks: deque[tuple[int, Seen]] = deque(maxlen=1000)  # that time, and what was above our frame
        self._noise = Noise()
        self._stop = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="tests.blocking", daemon=True)

    def install(self, reactor: Any) -> None:
        """Measure every callback of `reactor` from now on: timed calls, calls from threads, and
        files that are ready. Code of the product is not touched."""
        reactor.callLater = self._timing_second_argument(reactor.callLater)
        reactor.callFromThread = self._timing_first_argument(reactor.callFromThread)
        reactor._doReadOrWrite = self._timing_io(reactor._doReadOrWrite)
        gc.callbacks.append(self._on_gc)
        self._watcher.start()

    def close(self) -> None:
        """Stop watching; the reactor is done with."""
        self._stop.set()
        self._watcher.join()
        gc.callbacks.remove(self._on_gc)

    def take(self) -> list[Blocked]:
        """What was found since the last time."""
        found, self.found = self.found, []
        return found

    # -- the clock

    def _waited(self) -> int:
        return 0 if self._schedstat is None else int(os.pread(self._schedstat, 64, 0).split()[1])

    def _going(self) -> int:
        waited = self._waited()
        return time.perf_counter_ns() - waited - self._own_code - self._collected

    def clock(self) -> int:
        """Nanoseconds that the thread has been to blame for."""
        while True:
            collected = self._collected
            going, collecting = self._going(), self._collecting
            if collected == self._collected:  # otherwise another thread wrote between the two
                # another thread's collection may be over before that thread gets to say so
                return going if collecting is None else min(going, collecting)

    @contextlib.contextmanager
    def not_counted(self) -> Iterator[None]:
        """What runs in here is nobody's fault."""
        started = self.clock()
        try:
            yield
        finally:
            self._own_code += self.clock() - started

    def _on_gc(self, phase: str, _info: dict[str, int]) -> None:
        if phase == "start":
            self._collecting = self.clock()
        elif self._collecting is not None:  # otherwise it began before we were told of any
            self._collected += self._going() - self._collecting
            self._collecting = None

    # -- what is measured

    def timed(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call it as a callback of the reactor."""
        return self._measure(lambda: describe(function), function, *args, **kwargs)

    def _measure(
        self, name: Callable[[], str], function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        if self._running is not None:  # reactor.iterate() in a callback: the outer one is measured
            return function(*args, **kwargs)
        began, computed = time.perf_counter_ns(), time.thread_time_ns()
        started = self.clock()
        self._running = began
        try:
            return function(*args, **kwargs)
        finally:
            self._running = None
            busy = self.clock() - started
            if busy > self.limit * 1e6:
                self._too_long(name(), began, busy, time.thread_time_ns() - computed)

    def _too_long(self, name: str, began: int, busy: int, computed: int) -> None:
        noise = self._noise.since(began)
        computed = min(busy, computed)
        slept = busy - computed
        looks = [look for at, look in self._looks if at == began]
        self._looks.clear()
        maybe_held_up = slept * share(not look.asleep for look in looks)
        blamed = max(0, computed - noise.stolen) + slept - min(noise.held_up, maybe_held_up)
        blamed *= share(not look.in_tests for look in looks)
        if blamed > self.limit * 1e6:
            seen = next((look for look in looks if not look.in_tests), None)
            self.found.append(Blocked(name, blamed / 1e6, seen))

    def _timing_second_argument(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call_later(delay: float, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return original(delay, self._wrapped(function), *args, **kwargs)

        return call_later

    def _timing_first_argument(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call_from_thread(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return original(self._wrapped(function), *args, **kwargs)

        return call_from_thread

    def _wrapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if not callable(function):
            return function  # the reactor has its own words for that

        @functools.wraps(function)
        def callback(*args: Any, **kwargs: Any) -> Any:
            return self.timed(function, *args, **kwargs)

        return callback

    def _timing_io(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def do_read_or_write(selectable: Any, *args: Any) -> Any:
            def name() -> str:
                protocol = getattr(selectable, "protocol", None)
                kind = type(selectable if protocol is None else protocol)
                return f"{kind.__module__}.{kind.__qualname__} (reading or writing)"

            return self._measure(name, original, selectable, *args)

        return do_read_or_write

    def _watch(self) -> None:
        stacks = Stacks(self._reactor_thread)
        while not self._stop.wait(TICK):
            self._noise.tick()
            running = self._running
            if running is None or time.perf_counter_ns() - running < TICK * 1e9 / 2:
                continue
            look = seen(stacks.now(), self._noise.asleep())
            if look is not None and self._running == running:
                self._looks.append((running, look))
        stacks.close()

    # -- the test's own code

    def release(self, test: TestCase) -> None:
        """Let `test`'s own methods and clean-ups take as long as they like."""
        for name in ("setUp", "tearDown", test._testMethodName):
            setattr(test, name, self._own(getattr(test, name)))
        add_cleanup = test.addCleanup

        @functools.wraps(add_cleanup)
        def releasing(function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
            add_cleanup(self._own(function), *args, **kwargs)

        setattr(test, "addCleanup", releasing)  # noqa: B010 - typed as a method

    def _own(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.isgeneratorfunction(function):
            return function  # trial refuses it by itself

        @functools.wraps(function)
        def own(*args: Any, **kwargs: Any) -> Any:
            with self.not_counted():
                result = function(*args, **kwargs)
            if inspect.iscoroutine(result):  # Twisted 22.4 would drop a clean-up's unrun
                return Deferred.fromCoroutine(self._own_coroutine(result))
            return result

        if not hasattr(own, "__name__"):
            own.__name__ = repr(function)
        return own

    async def _own_coroutine(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return await self._driven(coroutine)

    @types.coroutine
    def _driven(self, coroutine: Coroutine[Any, Any, Any]) -> Generator[Any, Any, Any]:
        step: Callable[[], Any] = lambda: coroutine.send(None)  # noqa: E731
        while True:
            try:
                with self.not_counted():
                    awaited = step()
            except StopIteration as done:
                return done.value
            try:
                sent = yield awaited
            except GeneratorExit:
                coroutine.close()
                raise
            except BaseException as error:
                step = functools.partial(coroutine.throw, error)
            else:
                step = functools.partial(coroutine.send, sent)


def share(answers: Iterable[bool]) -> float:
    """How many of them are true, from 0 to 1; 1 where there are none."""
    given = list(answers)
    return sum(given) / len(given) if given else 1.0


def seen(calls: list[Call], asleep: bool) -> Seen | None:
    """What led from the callback's beginning to where it is; None: it is no longer under way."""
    below = [at for at, call in enumerate(calls) if call.file == HERE and call.function == "_measure"]
    above = calls[: below[-1]] if below else []
    if not above:
        return None
    own = next((call for call in above if call.own and call.file != HERE), above[0])
    in_tests = own.file.is_relative_to(ROOT / "tests")
    return Seen(own.name, in_tests, asleep, "".join(str(call) for call in reversed(above[:SHOWN])))
