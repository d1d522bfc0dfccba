# SPDX-License-Identifier: Apache-2.0
"""The pool of a real daemon that is killed and started again."""

from __future__ import annotations

import sqlite3
from typing import Any

from twisted.internet.defer import Deferred, gatherResults

from infranetes.pods.store.store import FILE
from infranetes_common.wire import cri
from tests.harness.needs import needs_registry
from tests.infranetes.daemon.case import DaemonCase


@needs_registry
class PoolTests(DaemonCase):
    """Pooled VMs in the store and in the farm."""

    def setUp(self) -> None:
        super().setUp()
        self.config["pool"] = {"parallel": 4, "per_minute": 600}
        self.size(3)

    def size(self, count: int, stopped: int = 0) -> None:
        self.sizes = f"\n[[pool.sizes]]\ncount = {count}\nstopped = {stopped}\n"

    def written(self) -> str:
        return super().written() + self.sizes

    def rows(self, table: str) -> list[tuple[Any, ...]]:
        with sqlite3.connect(self.root / "state" / FILE) as store:
            found = store.execute(f"SELECT id, state, token FROM {table}").fetchall()  # noqa: S608
        store.close()
        return found

    def stopped(self) -> set[str]:
        return {row[0] for row in self.rows("pool") if row[1] == "stopped"}

    def idle(self) -> set[str]:
        return {row[0] for row in self.rows("pool") if row[1] == "idle"}

    async def filled(self, count: int = 3) -> set[str]:
        await self.until(lambda: len(self.idle()) == count, f"the pool has {count} VMs")
        return self.idle()

    async def test_pods_have_its_vms_with_their_own_names_and_all_else(self) -> None:
        await self.start()
        before = await self.filled()
        works = [
            Deferred.fromCoroutine(self.run_pod(f"p{number}", hostname=f"p{number}")) for number in range(3)
        ]
        sandboxes = await gatherResults(works, consumeErrors=True)
        self.assertEqual(set(sandboxes), before)
        container = await self.run_container(sandboxes[0], self.box(script="sleep 1000"))
        await self.in_state(container, cri.CONTAINER_RUNNING)
        again = await self.filled()
        self.assertFalse(again & before)
        self.assertEqual(len(await self.vms()), 6)
        for sandbox in sandboxes:
            await self.remove_pod(sandbox)
        self.assertEqual({vm["sandbox_id"] for vm in await self.vms()}, again)

    async def test_killed_it_has_them_still_and_they_are_used_once(self) -> None:
        await self.start()
        before = await self.filled()
        used: set[str] = set()
        for number in range(3):
            await self.restart()
            sandbox = await self.run_pod(f"p{number}")
            self.assertNotIn(sandbox, used)
            used.add(sandbox)
            if not number:
                self.assertIn(sandbox, before)
            await self.filled()
        self.assertEqual({vm["sandbox_id"] for vm in await self.vms()}, used | self.idle())

    async def test_a_configuration_without_a_pool_ends_them(self) -> None:
        await self.start()
        await self.filled()
        sandbox = await self.run_pod()
        self.size(0)
        await self.restart()
        await self.until(lambda: not self.rows("pool"), "the pool is gone")
        self.assertEqual([vm["sandbox_id"] for vm in await self.vms()], [sandbox])

    async def test_those_that_wait_stopped_are_started_for_pods_by_the_next_daemon_too(self) -> None:
        self.size(0, stopped=2)
        await self.start()
        await self.until(lambda: len(self.stopped()) == 2, "two VMs are stopped")
        before = self.stopped()
        states = {vm["state"] for vm in await self.vms()}
        self.assertEqual(states, {"stopped"})
        used = {await self.run_pod("first")}
        await self.restart()
        await self.until(lambda: len(self.stopped()) == 2, "two VMs are stopped")
        self.assertLess(before - self.stopped(), before)
        used.add(second := await self.run_pod("second"))
        self.assertLessEqual(before & used, before)
        self.assertEqual(before & self.stopped(), before - used)
        container = await self.run_container(second, self.box(script="sleep 1000"))
        await self.in_state(container, cri.CONTAINER_RUNNING)
        self.size(0)
        await self.restart()
        await self.until(lambda: not self.rows("pool"), "the pool is gone")
        self.assertEqual({vm["sandbox_id"] for vm in await self.vms()}, used)
