# SPDX-License-Identifier: Apache-2.0
"""Tests that test_runner runs in a process of their own. The runner itself finds only test_*.py."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from twisted.internet import reactor as the_reactor
from twisted.internet import threads
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import TCP4ClientEndpoint, TCP4ServerEndpoint
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import deferLater
from twisted.trial.unittest import SynchronousTestCase, TestCase

from tests.harness.needs import NETWORK, Need, Tier, needs, nightly

reactor: Any = the_reactor
ROOT = Path(__file__).resolve().parents[2]


# Code that blocks, which the product must not do; it runs as if it were a module of the product.
# It sleeps for so long that it is seen asleep once at least, however busy the machine is.
PRODUCT = """
import time
from twisted.internet.protocol import Protocol
from twisted.internet.task import deferLater


def compute(seconds):
    began = time.perf_counter()
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass
    return time.perf_counter() - began


async def waits(reactor, error=None):
    await deferLater(reactor, 0)
    if error is not None:
        raise error


async def sleep_after_a_wait(reactor):
    await deferLater(reactor, 0)
    time.sleep(0.3)


class Sleepy(Protocol):
    def __init__(self, done):
        self.done = done

    def dataReceived(self, data):
        time.sleep(0.3)
        self.done.callback(None)
"""
product: dict[str, Any] = {"__name__": "infranetes.pretended"}
exec(compile(PRODUCT, str(ROOT / "infranetes" / "pretended.py"), "exec"), product)  # noqa: S102


async def computing_is_held_up(seconds: float) -> bool:
    """Compute for 30 ms in up to a hundred callbacks; return whether one took `seconds` longer than that."""
    for _ in range(100):
        if await deferLater(reactor, 0, product["compute"], 0.03) > 0.03 + seconds:
            return True
    return False


@contextlib.contextmanager
def busy_machine() -> Iterator[None]:
    """Return a context manager that binds this process to one processor, on which three others compute."""
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(own)})
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
    try:
        yield
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()
        os.sched_setaffinity(0, own)


class Blocking(TestCase):
    """Tests that each block the reactor, and so fail."""

    def test_timed_call_sleeps(self) -> Deferred[None]:
        return deferLater(reactor, 0.01, time.sleep, 0.3)

    def test_timed_call_computes(self) -> Deferred[float]:
        return deferLater(reactor, 0.01, product["compute"], 0.2)

    async def test_call_from_thread_sleeps(self) -> None:
        await threads.deferToThread(reactor.callFromThread, time.sleep, 0.3)
        await deferLater(reactor, 0.01)

    async def test_coroutine_sleeps(self) -> None:
        await Deferred.fromCoroutine(product["sleep_after_a_wait"](reactor))

    async def test_awaited_coroutine_sleeps(self) -> None:
        await product["sleep_after_a_wait"](reactor)

    async def test_awaited_by_another_sleeps(self) -> None:
        async def body() -> None:
            await product["sleep_after_a_wait"](reactor)

        await Deferred.fromCoroutine(body())

    async def test_protocol_sleeps(self) -> None:
        done: Deferred[None] = Deferred()
        factory = Factory.forProtocol(lambda: product["Sleepy"](done))
        port = await TCP4ServerEndpoint(reactor, 0, interface="127.0.0.1").listen(factory)
        self.addCleanup(port.stopListening)
        client: Any = await TCP4ClientEndpoint(reactor, "127.0.0.1", port.getHost().port).connect(
            Factory.forProtocol(Protocol)
        )
        client.transport.write(b"good morning")
        await done
        client.transport.loseConnection()
        await deferLater(reactor, 0.05)


class BlockingInHaste(TestCase):
    """A test that sleeps while other processes want the processor, and so fails."""

    async def test_sleeps_on_a_busy_machine(self) -> None:
        with busy_machine():
            await Deferred.fromCoroutine(product["sleep_after_a_wait"](reactor))


class FailingOnce(SynchronousTestCase):
    """One test that fails, beside a hundred that pass."""

    def test_fails(self) -> None:
        self.fail("on purpose")


for number in range(100):
    setattr(FailingOnce, f"test_{number}_of_many", lambda self: None)


class Innocent(TestCase):
    """Tests that only seem to block, and do not fail."""

    async def setUp(self) -> None:
        await deferLater(reactor, 0.001)
        time.sleep(0.1)
        self.addCleanup(time.sleep, 0.1)

    async def tearDown(self) -> None:
        await deferLater(reactor, 0.001)
        time.sleep(0.1)

    async def test_own_code_sleeps(self) -> None:
        time.sleep(0.1)
        await deferLater(reactor, 0.001)
        time.sleep(0.1)
        try:
            await deferLater(reactor, 0.001, int, "no number")
        except ValueError:
            time.sleep(0.1)

    async def test_own_inner_coroutine_sleeps(self) -> None:
        async def body() -> None:
            await deferLater(reactor, 0.001)
            time.sleep(0.1)

        await Deferred.fromCoroutine(body())

    async def test_sleeps_itself_after_a_coroutine_of_the_product(self) -> None:
        await product["waits"](reactor)
        time.sleep(0.1)
        with contextlib.suppress(ValueError):
            await product["waits"](reactor, ValueError())
        time.sleep(0.1)

    async def test_thread_sleeps(self) -> None:
        await threads.deferToThread(time.sleep, 0.2)

    async def test_another_thread_collects_garbage(self) -> None:
        heap: list[list[int]] = [[] for _ in range(3_000_000)]
        enough = threading.Event()

        def collect() -> None:
            while not enough.is_set():
                gc.collect()

        collecting = threads.deferToThread(collect)
        try:
            held_up = await computing_is_held_up(0.03)
        finally:
            enough.set()
            await collecting
        self.assertTrue(held_up, f"{len(heap)} objects were collected too soon to prove anything")

    async def test_other_processes_have_the_processor(self) -> None:
        with busy_machine():
            held_up = await computing_is_held_up(0.02)
        self.assertTrue(held_up, "the machine was too idle to prove anything")


class Leaking(SynchronousTestCase):
    """Tests of which each but the last leaves something behind, and so fails."""

    def test_child(self) -> None:
        subprocess.Popen(["sleep", "60"])

    def test_thread(self) -> None:
        threading.Thread(target=time.sleep, args=(5,), daemon=True, name="forgotten").start()

    def test_listener(self) -> None:
        Leaking.kept = socket.create_server(("127.0.0.1", 0))  # type: ignore[attr-defined]

    def test_what_ends_soon(self) -> None:
        self.addCleanup(subprocess.Popen(["sleep", "0.3"]).poll)
        threading.Thread(target=time.sleep, args=(0.3,)).start()


class Coroutine(TestCase):
    async def test_fails_after_a_while(self) -> None:
        await deferLater(reactor, 0.01)
        self.fail("on purpose")

    async def test_breaks_in_its_cleanup(self) -> None:
        async def cleanup() -> None:
            await deferLater(reactor, 0.01)
            self.fail("on purpose")

        self.addCleanup(cleanup)


class Ending(SynchronousTestCase):
    """One test for each way to end."""

    def test_passes(self) -> None:
        pass

    def test_fails(self) -> None:
        self.fail("on purpose")

    def test_breaks(self) -> None:
        raise RuntimeError("on purpose")

    def test_is_skipped(self) -> None:
        pass

    test_is_skipped.skip = "on purpose"  # type: ignore[attr-defined]

    def test_is_expected_to_fail(self) -> None:
        self.fail("on purpose")

    test_is_expected_to_fail.todo = "on purpose"  # type: ignore[attr-defined]

    def test_passes_unexpectedly(self) -> None:
        pass

    test_passes_unexpectedly.todo = "on purpose"  # type: ignore[attr-defined]

    def test_fails_and_its_cleanup_breaks(self) -> None:
        self.addCleanup(int, "no number")
        self.fail("on purpose")


class Dying(SynchronousTestCase):
    """Tests of which the second ends the process that runs it."""

    def test_1_passes(self) -> None:
        pass

    def test_2_dies(self) -> None:
        os._exit(3)

    def test_3_runs_all_the_same(self) -> None:
        pass


class Fixture(TestCase):
    """Tests that share what is made once for all of them."""

    made = 0

    @classmethod
    def setUpClass(cls) -> None:
        cls.made += 1

    @classmethod
    def tearDownClass(cls) -> None:
        print(f"made {cls.made} times, and gone")

    def test_1(self) -> None:
        self.assertEqual(self.made, 1)

    def test_2(self) -> None:
        self.assertEqual(self.made, 1)


class Endless(SynchronousTestCase):
    """Tests of which the first never ends."""

    stuck_seconds = 0.5

    def test_1_sleeps(self) -> None:
        time.sleep(1000)

    def test_2_runs_all_the_same(self) -> None:
        pass


class Patient(SynchronousTestCase):
    """Tests that write a file when they begin, then wait for another one, beside a child of their own."""

    def wait(self) -> None:
        directory = Path(os.environ["INFRANETES_TEST_PATIENCE"])
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        self.addCleanup(child.wait)
        self.addCleanup(child.kill)
        name = self.id().removeprefix(f"{__name__}.")
        (directory / "new").write_text(os.readlink("/proc/self/ns/net"))
        (directory / "new").rename(directory / name)
        while not (directory / "enough").exists():
            time.sleep(0.01)

    def test_1(self) -> None:
        self.wait()

    def test_2(self) -> None:
        self.wait()


class PatientToo(Patient):
    """The same in another class, which may run beside it."""


@needs(NETWORK)
class Networked(TestCase):
    """Tests for root with its usual rights."""

    def test_1(self) -> None:
        pass

    def test_2(self) -> None:
        pass


@needs(Need("a unicorn", "catch one", Tier.TEST, lambda: False))
class Needy(SynchronousTestCase):
    """Tests that need what no machine has."""

    def test_1(self) -> None:
        pass

    def test_2(self) -> None:
        pass


@nightly
class Nocturnal(SynchronousTestCase):
    """A test that takes hours."""

    def test_1(self) -> None:
        pass
