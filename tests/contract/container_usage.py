# SPDX-License-Identifier: Apache-2.0
"""The contract of the usage statistics of every ContainerProvider."""

from __future__ import annotations

import time
from typing import Any, ClassVar

from twisted.internet.task import deferLater

from infranetes_common.reactors import installed
from infranetes_common.wire import vmserver as messages
from tests.contract.container_provider_case import ContainerProviderCase

reactor = installed()

BUSY = "i=0; while :; do i=$((i+1)); done"


class UsageContract(ContainerProviderCase):
    """The usage of a container's processes, and of what it has written."""

    #: Whether files that a container writes on top of its image are counted.
    counts_written: ClassVar[bool] = True

    async def used(self, id: str) -> Any:
        """Return a container's ContainerUsage; None: there is none."""
        found = [usage for usage in await self.provider.usage() if usage.id == id]
        self.assertLessEqual(len(found), 1)
        return found[0] if found else None

    async def test_a_busy_one_uses_processor_and_memory(self) -> None:
        id = await self.run_container("sh", "-c", f"sleep 600 & {BUSY}")
        state = await self.state(id)
        samples: list[Any] = []

        async def used_some() -> bool:
            samples.append((await self.used(id)).usage)
            return bool(samples[-1].cpu.total_nanos - samples[0].cpu.total_nanos > 100_000_000)

        await self.until(used_some, "a tenth of a second of processor is used", 60.0)
        first, last = samples[0], samples[-1]
        self.assertEqual((await self.used(id)).started_at, state.started_at)
        self.assertLess(abs(last.time_nanos - time.time_ns()), 60 * 10**9)
        self.assertGreater(last.time_nanos, first.time_nanos)
        self.assertGreaterEqual(last.cpu.user_nanos + last.cpu.system_nanos, 50_000_000)
        self.assertFalse(last.cpu.HasField("nano_cores"))
        self.assertEqual(last.processes, 2)
        self.assertGreaterEqual(last.threads, 2)
        self.assertGreater(last.memory.working_set, 0)
        self.assertGreaterEqual(last.memory.usage, last.memory.working_set)
        self.assertLess(last.memory.working_set, 64 << 20)
        self.assertGreater(last.memory.page_faults, 0)

    async def test_an_idle_one_uses_next_to_nothing(self) -> None:
        id = await self.run_container("sleep", "600")
        first = (await self.used(id)).usage
        await deferLater(reactor, 0.5, lambda: None)
        last = (await self.used(id)).usage
        self.assertLess(last.cpu.total_nanos - first.cpu.total_nanos, 100_000_000)
        self.assertEqual(last.processes, 1)

    async def test_only_what_runs_uses_anything(self) -> None:
        created, ran = await self.create("sleep", "600"), await self.run_container("true")
        await self.ended(ran)
        for id in (created, ran):
            for _ in range(2):
                usage = await self.used(id)
                self.assertFalse(usage.HasField("usage"), str(usage))
        await self.provider.remove(ran)
        self.assertIsNone(await self.used(ran))
        self.assertIsInstance(await self.used(created), messages.ContainerUsage)

    async def test_the_next_agent_measures_on(self) -> None:
        id = await self.run_container("sh", "-c", BUSY)

        async def used_some() -> bool:
            return bool((await self.used(id)).usage.cpu.total_nanos > 50_000_000)

        await self.until(used_some, "some processor is used", 60.0)
        before = (await self.used(id)).usage.cpu.total_nanos
        await self.restarted()
        self.assertGreaterEqual((await self.used(id)).usage.cpu.total_nanos, before)

    async def test_many_who_ask_at_once_are_all_answered(self) -> None:
        id = await self.run_container("sleep", "600")
        asking = [self.provider.usage() for _ in range(10)]
        for one in asking:
            self.assertEqual([usage.id for usage in await one], [id])

    async def test_what_it_wrote_is_counted(self) -> None:
        if not self.counts_written:  # the container's files are the machine's own
            id = await self.run_container("sleep", "600")
            self.assertFalse((await self.used(id)).HasField("written"))
            return
        id = await self.run_container("sh", "-c", "head -c 3000000 /dev/zero > /big; touch /done; sleep 600")

        async def written() -> bool:
            result = await self.provider.exec_sync(id, ["test", "-e", "/done"], 10.0, 100)
            return bool(result.exit_code == 0)

        await self.until(written, "it is written")
        await self.restarted()  # so that the first count is made after the writing

        async def counted() -> bool:
            return bool((await self.used(id)).HasField("written"))

        await self.until(counted, "it is counted")
        found = (await self.used(id)).written
        self.assertGreaterEqual(found.bytes, 3_000_000)
        self.assertLess(found.bytes, 4_000_000)
        self.assertGreaterEqual(found.inodes, 2)
