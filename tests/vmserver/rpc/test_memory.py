# SPDX-License-Identifier: Apache-2.0
"""ReleaseMemory, RestoreMemory and UseProcessors: which requests are allowed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.concurrency import start
from infranetes_common.errors import InvalidArgument, Unimplemented
from infranetes_common.wire import vmserver as messages
from txgrpc import Call
from vmserver.machine.memory import MachineMemory, Range
from vmserver.machine.processors import MachineProcessors
from vmserver.rpc.memory import MAX_RANGES, MAX_SECONDS, MemoryCalls
from vmserver.rpc.processors import ProcessorCalls

CALL = cast(Call, None)
GIB = 1 << 30


class Memory:
    """Record the calls."""

    def __init__(self) -> None:
        self.told: list[object] = []

    async def release(self, ranges: Sequence[Range], seconds: float) -> None:
        self.told.append(("release", list(ranges), seconds))

    async def restore(self, ranges: Sequence[Range]) -> None:
        self.told.append(("restore", list(ranges)))


class MemoryCallTests(SynchronousTestCase):
    """On a machine that is a pod's alone, and on one that is not."""

    def setUp(self) -> None:
        self.memory = Memory()
        self.calls = MemoryCalls(cast(MachineMemory, self.memory))

    def ranges(self, count: int) -> list[messages.MemoryRange]:
        return [messages.MemoryRange(address=n * GIB, size=GIB) for n in range(count)]

    def test_ranges_are_handed_on(self) -> None:
        release = messages.ReleaseMemoryRequest(ranges=self.ranges(2), seconds=1.5)
        self.successResultOf(start(self.calls.ReleaseMemory(release, CALL)))
        restore = messages.RestoreMemoryRequest(ranges=self.ranges(1))
        self.successResultOf(start(self.calls.RestoreMemory(restore, CALL)))
        both = [Range(0, GIB), Range(GIB, GIB)]
        self.assertEqual(self.memory.told, [("release", both, 1.5), ("restore", both[:1])])

    def test_too_many_none_and_no_time_are_refused(self) -> None:
        for ranges, seconds in (
            (0, 1.0),
            (MAX_RANGES + 1, 1.0),
            (1, 0.0),
            (1, -1.0),
            (1, float("nan")),
            (1, float("inf")),
            (1, MAX_SECONDS + 1),
        ):
            request = messages.ReleaseMemoryRequest(ranges=self.ranges(ranges), seconds=seconds)
            self.failureResultOf(start(self.calls.ReleaseMemory(request, CALL)), InvalidArgument)
        self.failureResultOf(
            start(self.calls.RestoreMemory(messages.RestoreMemoryRequest(), CALL)), InvalidArgument
        )
        self.assertEqual(self.memory.told, [])

    def test_a_machine_of_several_pods_gives_nothing_back(self) -> None:
        calls = MemoryCalls(None)
        release = messages.ReleaseMemoryRequest(ranges=self.ranges(1), seconds=1.0)
        self.failureResultOf(start(calls.ReleaseMemory(release, CALL)), Unimplemented)
        restore = messages.RestoreMemoryRequest(ranges=self.ranges(1))
        self.failureResultOf(start(calls.RestoreMemory(restore, CALL)), Unimplemented)


class ProcessorCallTests(SynchronousTestCase):
    """On such machines, too."""

    def test_the_number_is_handed_on(self) -> None:
        told: list[int] = []

        class Processors:
            async def use(self, count: int, seconds: float) -> None:
                told.append(count)

        calls = ProcessorCalls(cast(MachineProcessors, Processors()))
        self.successResultOf(start(calls.UseProcessors(messages.UseProcessorsRequest(count=3), CALL)))
        self.failureResultOf(
            start(calls.UseProcessors(messages.UseProcessorsRequest(), CALL)), InvalidArgument
        )
        self.assertEqual(told, [3])

    def test_a_machine_of_several_pods_uses_all(self) -> None:
        request = messages.UseProcessorsRequest(count=1)
        self.failureResultOf(start(ProcessorCalls(None).UseProcessors(request, CALL)), Unimplemented)
