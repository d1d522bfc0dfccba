# SPDX-License-Identifier: Apache-2.0
"""Finds callbacks that block the reactor.

Two times of each callback are measured, and neither may exceed the limit:

- the processor time of the reactor's thread, which the load of the machine does not change, less the time for
  which the processor itself stood still (`stalls`).
- the time asleep: the elapsed time in which the thread neither had a processor nor waited for one. It counts
  only if the thread was seen asleep in a system call meanwhile (`stacks`): in a sleep, in disk I/O, or
  waiting for a child. Otherwise other processes on the machine account for it.

Garbage collection is not counted, because the heap is mostly the tests' own. Nor is the time that tests spend
in their own methods, clean-ups and coroutines; coroutines of the product that a test awaits are counted. A
test that blocks fails at once, without a second try.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import math
import threading
import time
import types
import weakref
from collections.abc import Callable, Coroutine, Generator, Iterator
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.defer import Deferred
from twisted.trial.unittest import TestCase

from tests.harness.stacks import Stacks
from tests.harness.stalls import Stalls

ROOT = Path(__file__).resolve().parents[2]
TESTS = f"{ROOT}/tests/"
PRODUCT = tuple(
    f"{ROOT}/{name}/"
    for name in ("infranetes", "infranetes_common", "infranetes_simulation", "txgrpc", "vmserver")
)


@attrs.frozen
class BlockingCallback:
    """A callback that took too long."""

    name: str
    computed: float  # milliseconds
    slept: float  # milliseconds
    stack: str = ""  # where it spent the time, if it was sampled

    def __str__(self) -> str:
        times = f"computed for {self.computed:.0f} ms and slept for {self.slept:.0f} ms"
        return f"{self.name} blocked the reactor: it {times}\n{self.stack}".rstrip()


@attrs.frozen
class Times:
    """The two times of a callback, in nanoseconds."""

    computed: int
    slept: int

    def __add__(self, other: Times) -> Times:
        return Times(self.computed + other.computed, self.slept + other.slept)

    def __sub__(self, other: Times) -> Times:
        return Times(self.computed - other.computed, self.slept - other.slept)


def describe(function: Callable[..., Any]) -> str:
    """Return a readable name: the module and qualified name of the function inside partials and wrappers."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    name = getattr(function, "__qualname__", None) or repr(function)
    owner = getattr(function, "__self__", None)
    if owner is not None and not isinstance(owner, type | types.ModuleType):
        name = f"{type(owner).__qualname__}.{getattr(function, '__name__', name)}"
    return f"{getattr(function, '__module__', None) or '?'}.{name}"


def _is_test(code: types.CodeType) -> bool:
    return code.co_filename.startswith(TESTS)


def _awaited(coroutine: Any) -> Any:
    """Return the product's coroutine that a test's coroutine awaits, directly or not; None: there is none."""
    while inspect.iscoroutine(coroutine):
        if coroutine.cr_code.co_filename.startswith(PRODUCT):
            return coroutine
        coroutine = coroutine.cr_await
    return None


class BlockingGuard:
    """Measures the callbacks of one reactor. `install` it once, in the reactor's thread.

    :param limit: milliseconds that each of a callback's times may take; 0: there is no limit.
    :param stalls: the processors' stalls, which are deducted.
    """

    def __init__(self, limit: float, stalls: Stalls) -> None:
        self._limit = (limit or math.inf) * 1e6  # nanoseconds
        self._stalls = stalls
        self._found: list[BlockingCallback] = []
        self._thread = threading.get_ident()
        self._not_counted = Times(0, 0)
        self._collected = 0  # nanoseconds of processor time that garbage collections took
        self._collection_began = 0  # in processor time; 0: none is under way
        self._measuring = False
        self._from_coroutine = Deferred.fromCoroutine
        self._stacks = Stacks()

    def install(self, reactor: Any) -> None:
        """Measure every callback from now on: timed calls, calls from threads, and I/O on ready files.

        This patches the reactor and `Deferred.fromCoroutine`; the product stays as it is.
        """
        reactor.callLater = self._timing_second_argument(reactor.callLater)
        reactor.callFromThread = self._timing_first_argument(reactor.callFromThread)
        reactor._doReadOrWrite = self._timing_io(reactor._doReadOrWrite)
        gc.callbacks.append(self._on_gc)
        setattr(Deferred, "fromCoroutine", self._deferred)  # noqa: B010 - a method
        self._stacks.start()

    def close(self) -> None:
        """Stop measuring. Call this when the reactor is no longer used."""
        self._stacks.stop()
        setattr(Deferred, "fromCoroutine", self._from_coroutine)  # noqa: B010 - a method
        gc.callbacks.remove(self._on_gc)

    def take(self) -> list[BlockingCallback]:
        """Return the blocking callbacks found since the last call."""
        found, self._found = self._found, []
        return found

    # -- the times

    def _times(self) -> Times:
        while True:
            collected, before = self._collected, self._stacks.thread.waited()
            wall, computed, waited = (
                time.perf_counter_ns(),
                time.thread_time_ns(),
                self._stacks.thread.waited(),
            )
            # If the thread waited or collected garbage between the readings, they disagree: read again.
            # `collected` is read only once, because making the results below may collect garbage, too.
            if waited == before and collected == self._collected:
                return Times(computed - collected, wall - computed - waited) - self._not_counted

    def _first_times(self) -> Times:
        """Return the times before a callback, which is nearly always short: as cheaply as possible.

        If the thread waits between these readings, it seems to sleep for that long."""
        wall, computed, waited = time.perf_counter_ns(), time.thread_time_ns(), self._stacks.thread.waited()
        return Times(computed - self._collected, wall - computed - waited) - self._not_counted

    @contextlib.contextmanager
    def not_counted(self) -> Iterator[None]:
        """Return a context manager whose block is not counted."""
        began, self._stacks.began = self._stacks.began, 0
        started = self._times()
        try:
            yield
        finally:
            self._not_counted += self._times() - started
            self._stacks.began = began

    def _on_gc(self, phase: str, _info: dict[str, int]) -> None:
        if threading.get_ident() != self._thread:
            return
        if phase == "start":
            self._collection_began = time.thread_time_ns()
        elif self._collection_began:  # otherwise the collection began before `install`
            self._collected += time.thread_time_ns() - self._collection_began
            self._collection_began = 0

    # -- what is measured

    def _measure(
        self, name: Callable[[], str], function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        if self._measuring:  # called by reactor.iterate() in another callback, which is measured as a whole
            return function(*args, **kwargs)
        started = self._first_times()
        self._measuring = True
        self._stacks.began = began = time.perf_counter_ns()
        try:
            return function(*args, **kwargs)
        finally:
            self._measuring = False
            self._stacks.began = 0
            if time.perf_counter_ns() - began > self._limit:  # otherwise neither time can be over it
                took = self._times() - started
                if max(took.computed, took.slept) > self._limit:
                    self._report(name, took, began)

    def _report(self, name: Callable[[], str], took: Times, began: int) -> None:
        sample = self._stacks.typical(began)
        slept = took.slept if sample.asleep else 0
        stalled = self._stalls.nanoseconds(self._stacks.thread.processor(), began, time.perf_counter_ns())
        computed = max(0, took.computed - stalled)
        if max(computed, slept) > self._limit:
            self._found.append(BlockingCallback(name(), computed / 1e6, slept / 1e6, sample.stack))

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
            return function  # the reactor raises a clearer error

        @functools.wraps(function)
        def callback(*args: Any, **kwargs: Any) -> Any:
            return self._measure(lambda: describe(function), function, *args, **kwargs)

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

    # -- the test's own code

    def exempt(self, test: TestCase) -> None:
        """Do not count the test's own methods and clean-ups."""
        for name in ("setUp", "tearDown", test._testMethodName):
            setattr(test, name, self._exempt(getattr(test, name)))
        add_cleanup = test.addCleanup

        @functools.wraps(add_cleanup)
        def add_exempt(function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
            add_cleanup(self._exempt(function), *args, **kwargs)

        setattr(test, "addCleanup", add_exempt)  # noqa: B010 - typed as a method

    def _exempt(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.isgeneratorfunction(function):
            return function  # trial itself refuses it

        @functools.wraps(function)
        def exempt(*args: Any, **kwargs: Any) -> Any:
            with self.not_counted():
                result = function(*args, **kwargs)
            if inspect.iscoroutine(result):  # trial of Twisted 22.4 would not run a clean-up's coroutine
                return self._from_coroutine(self._exempt_coroutine(result))
            return result

        if not hasattr(exempt, "__name__"):
            exempt.__name__ = repr(function)
        return exempt

    def _deferred(self, coroutine: Any) -> Any:
        """Do as `Deferred.fromCoroutine`, which this replaces, but do not count a test's own coroutine."""
        if inspect.iscoroutine(coroutine) and _is_test(coroutine.cr_code):
            coroutine = self._exempt_coroutine(coroutine)
        return self._from_coroutine(coroutine)

    async def _exempt_coroutine(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return await self._driven(coroutine)

    def _step(self, coroutine: Coroutine[Any, Any, Any], step: Callable[[], Any]) -> Any:
        """Run one step of a test's coroutine.

        If the step resumes a coroutine of the product, it counts until that coroutine ends and so is freed.
        """
        with contextlib.ExitStack() as rest:
            product = _awaited(coroutine)
            if product is None:
                rest.enter_context(self.not_counted())
                return step()
            _ended = weakref.ref(product, lambda _: rest.enter_context(self.not_counted()))
            del product
            return step()

    @types.coroutine
    def _driven(self, coroutine: Coroutine[Any, Any, Any]) -> Generator[Any, Any, Any]:
        step: Callable[[], Any] = lambda: coroutine.send(None)  # noqa: E731
        while True:
            try:
                awaited = self._step(coroutine, step)
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
