# SPDX-License-Identifier: Apache-2.0
"""Whatever fails on the way to a VM's kernel, the VM finally has all rules, and no connection is cut."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from twisted.internet.defer import maybeDeferred

from infranetes.services import sender
from infranetes_common.concurrency import deferred, run_in_thread, start
from infranetes_common.errors import InfranetesError
from tests.harness.durations import slow
from tests.harness.needs import needs_netns, repetitions
from tests.infranetes.kubernetes.faults import (
    COUNTS,
    HEAL_SECONDS,
    OF_SERVER,
    FaultCase,
    Step,
    reactor,
    thd_awaited,
)
from tests.infranetes.services.faults import Lasting, VmBed

EXAMPLES = int(os.environ.get("INFRANETES_TEST_FAULTS") or repetitions(15, nightly=100))
STEADY, STEADY_ENDPOINT = "10.96.0.200", "10.1.0.4"

NAMES = st.sampled_from("abc")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), NAMES, st.integers(1, 3), st.frozensets(st.integers(1, 3))),
        st.tuples(st.just("put"), NAMES, st.integers(1, 3), st.frozensets(st.integers(1, 3))),
        st.tuples(st.just("remove"), NAMES),
        st.tuples(st.just("restore"), st.frozensets(NAMES)),
        st.tuples(st.sampled_from(("refused", "cut off", "unread", "deaf")), COUNTS),
        st.tuples(st.just("break")),
        *OF_SERVER,
    ),
    min_size=3,
    max_size=20,
)


@needs_netns
class FaultTests(FaultCase[VmBed]):
    pausing = (sender,)

    def make_bed(self, directory: Path) -> VmBed:
        bed = VmBed(directory)
        bed.put("steady", 200, (4,))
        return bed

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
            self.thd_heal()
            self.thd_wait_until_equal()
            lasting.thd_check()

        try:
            thd_try()
        finally:
            lasting.end()

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
            case ("break",):
                bed.agent.break_off()
            case _:
                super().do(step)

    def heal(self) -> None:
        super().heal()
        bed = self.bed
        bed.kernel.refused = bed.kernel.cut_off = bed.kernel.unread = bed.agent.deaf = 0

    def thd_wait_until_equal(self) -> None:
        """:raise AssertionError: the VM does not reach the expected state in time."""
        until = time.monotonic() + HEAL_SECONDS
        expected = self.bed.expected()
        while True:
            found = thd_awaited(lambda: start(self.bed.in_kernel()))
            told = thd_awaited(lambda: maybeDeferred(self.bed.told))
            if found == expected and told:
                return
            if time.monotonic() > until:
                self.fail(f"there is {expected}, a VM has {found}; {self.bed.sender.trouble}")
            time.sleep(0.01)
