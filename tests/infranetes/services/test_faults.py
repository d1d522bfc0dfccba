# SPDX-License-Identifier: Apache-2.0
"""Whatever fails on the way to a VM's kernel, the VM finally has all rules, and no connection is cut."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from twisted.internet.defer import maybeDeferred
from twisted.trial.unittest import TestCase

from infranetes.kubernetes import watch
from infranetes.services import sender
from infranetes_common.concurrency import deferred, run_in_thread, start
from infranetes_common.errors import InfranetesError
from infranetes_common.reactors import installed
from tests.harness.durations import slow
from tests.harness.needs import needs_netns, repetitions
from tests.infranetes.services.faults import Bed, Lasting, thd_awaited

reactor = installed()
EXAMPLES = int(os.environ.get("INFRANETES_TEST_FAULTS") or repetitions(15, nightly=100))
HEAL_SECONDS = 60.0  # within which the VM must have everything once nothing fails any more
STEADY, STEADY_ENDPOINT = "10.96.0.200", "10.1.0.4"

Step = tuple[object, ...]
NAMES = st.sampled_from("abc")
COUNTS = st.integers(1, 3)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), NAMES, st.integers(1, 3), st.frozensets(st.integers(1, 3))),
        st.tuples(st.just("put"), NAMES, st.integers(1, 3), st.frozensets(st.integers(1, 3))),
        st.tuples(st.just("remove"), NAMES),
        st.tuples(st.just("restore"), st.frozensets(NAMES)),
        st.tuples(st.sampled_from(("refused", "cut off", "unread", "deaf")), COUNTS),
        st.tuples(st.just("status"), st.sampled_from((0, 401, 410, 429, 500))),
        st.tuples(st.just("trickle"), st.sampled_from((0, 50))),
        st.tuples(
            st.sampled_from(
                ("away", "back", "compact", "expire", "close", "abort", "break", "daemon", "agent", "mend")
            )
        ),
        st.tuples(st.just("wait"), st.sampled_from((0.0, 0.01, 0.1))),
    ),
    min_size=3,
    max_size=20,
)


@needs_netns
class FaultTests(TestCase):
    timeout = 900

    @deferred
    async def setUp(self) -> None:
        for module in (watch, sender):
            self.patch(module, "FIRST_PAUSE", 0.01)
            self.patch(module, "LONGEST_PAUSE", 0.05)
        directory = Path(self.mktemp())
        directory.mkdir()
        self.bed = Bed(reactor, directory)
        await run_in_thread(reactor, self.bed.thd_make_network)
        self.bed.put("steady", 200, (4,))
        self.bed.start()
        self.addCleanup(self.end)

    @deferred
    async def end(self) -> None:
        self.bed.stop()
        if not self.bed.away:
            await self.bed.server.stop()
        await run_in_thread(reactor, self.bed.thd_remove_network)

    @slow(5, "each example is judged by what is in a real kernel")
    @deferred
    async def test_whatever_fails(self) -> None:
        await run_in_thread(reactor, self.thd_judge)

    def thd_judge(self) -> None:
        self.thd_wait_until_equal()
        lasting = Lasting(self.bed.space, STEADY, STEADY_ENDPOINT)
        self.bed.space.serve(STEADY_ENDPOINT, 8080)

        @settings(max_examples=EXAMPLES, phases=(Phase.explicit, Phase.generate, Phase.shrink))
        @given(STEPS)
        def thd_try(steps: list[Step]) -> None:
            for step in steps:
                self.thd_do(step)
                found = self.bed.space.reached(STEADY, 80, seconds=20)
                self.assertEqual(set(found), {f"{STEADY_ENDPOINT}:8080"}, f"after {step} of {steps}")
            thd_awaited(reactor, lambda: maybeDeferred(self.heal))
            self.thd_wait_until_equal()
            lasting.thd_check()

        try:
            thd_try()
        finally:
            lasting.end()

    def thd_do(self, step: Step) -> None:
        match step:
            case ("wait", float(seconds)):
                time.sleep(seconds)
            case ("mend",):
                thd_awaited(reactor, self.mend)
            case ("away",) if not self.bed.away:
                self.bed.away = True
                thd_awaited(reactor, self.bed.server.stop)
            case _:
                thd_awaited(reactor, lambda: maybeDeferred(self.do, step))

    @deferred
    async def mend(self) -> None:
        with contextlib.suppress(InfranetesError):
            await self.bed.agent.proxy.mend()

    def do(self, step: Step) -> None:
        bed = self.bed
        match step:
            case ("put", str(name), int(number), frozenset(endpoints)):
                bed.put(name, number, tuple(sorted(endpoints)))
            case ("remove", str(name)):
                bed.remove(name)
            case ("restore", frozenset(lost)):
                bed.restore(lost)
            case ("refused", int(count)):
                bed.kernel.refused = count
            case ("cut off", int(count)):
                bed.kernel.cut_off = count
            case ("unread", int(count)):
                bed.kernel.unread = count
            case ("deaf", int(count)):
                bed.agent.deaf = count
            case ("status", int(status)):
                bed.server.status = status
            case ("trickle", int(size)):
                bed.server.trickle = size
            case (str(name),):
                self.simple(name)

    def simple(self, name: str) -> None:
        bed = self.bed
        found: dict[str, Callable[[], None]] = {
            "compact": bed.server.compact,
            "expire": bed.server.expire,
            "close": bed.server.close_watches,
            "abort": lambda: bed.server.close_watches(abort=True),
            "break": bed.agent.break_off,
            "daemon": bed.restart_daemon,
            "agent": bed.restart_agent,
        }
        if name == "back" and bed.away:
            bed.away = False
            bed.server.start(bed.port)
        elif name in found:
            found[name]()

    def heal(self) -> None:
        """Let nothing fail any more."""
        bed = self.bed
        self.simple("back")
        bed.server.status = bed.server.trickle = 0
        bed.kernel.refused = bed.kernel.cut_off = bed.kernel.unread = bed.agent.deaf = 0

    def thd_wait_until_equal(self) -> None:
        """:raise AssertionError: the VM does not reach the expected state in time."""
        until = time.monotonic() + HEAL_SECONDS
        expected = self.bed.expected()
        while True:
            found = thd_awaited(reactor, lambda: start(self.bed.in_kernel()))
            told = thd_awaited(reactor, lambda: maybeDeferred(self.bed.told))
            if found == expected and told:
                return
            if time.monotonic() > until:
                self.fail(f"there is {expected}, a VM has {found}; {self.bed.sender.trouble}")
            time.sleep(0.01)
