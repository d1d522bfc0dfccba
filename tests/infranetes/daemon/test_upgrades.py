# SPDX-License-Identifier: Apache-2.0
"""A node that is upgraded, and one that goes back: daemons and agents of this release and the one before."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

from twisted.internet.threads import deferToThread

from infranetes.pods.database import MIGRATIONS
from infranetes.pods.store import FILE
from infranetes_common.wire import cri
from tests.infranetes.daemon.case import ROOT, DaemonCase
from tests.support.releases import previous_release

READY = cri.PodSandboxStateValue(state=cri.SANDBOX_READY)
_COUNTS = "i=0; while :; do echo $i; i=$((i+1)); sleep 0.1; done"


class UpgradeTests(DaemonCase):
    """Daemons of both releases over the same directory, one after the other; the VMs are the first one's."""

    timeout = 300

    async def test_this_release_goes_on_with_the_pods_of_the_one_before(self) -> None:
        await self.lives_on(await deferToThread(previous_release), ROOT)

    async def test_the_release_before_goes_on_with_the_pods_of_this_one(self) -> None:
        await self.lives_on(ROOT, await deferToThread(previous_release))

    async def lives_on(self, first: Path, then: Path) -> None:
        """The first daemon's pods, with its agents, are the next one's, whatever is done with them."""
        self.tree = first
        await self.start()
        before = await self.release()
        pod, stopped = await self.run_pod(), await self.run_pod("stopped")
        main = await self.run_container(pod, self.box(script=_COUNTS))
        ended = await self.run_container(pod, self.box("ended", script="exit 3"))
        await self.in_state(ended, cri.CONTAINER_EXITED)
        waiting = await self.create(pod, self.box("waiting", script="exit 4"))
        await self.stop_pod(stopped)
        await self.until(lambda: len(self.counted()) > 3, "the container counts")
        started = (await self.container_status(main)).started_at

        await self.kill()
        self.tree = then
        await self.start()
        self.assertNotEqual(await self.release(), before)
        listed = {each.id: each.state for each in await self.sandboxes()}
        self.assertEqual(listed, {pod: cri.SANDBOX_READY, stopped: cri.SANDBOX_NOTREADY})
        self.assertEqual((await self.in_state(main, cri.CONTAINER_RUNNING)).started_at, started)
        self.assertEqual((await self.container_status(ended)).exit_code, 3)
        seen = len(self.counted())
        await self.until(lambda: len(self.counted()) > seen + 3, "its log goes on")
        self.assertEqual(self.counted(), list(range(len(self.counted()))))

        execute = cri.ExecSyncRequest(container_id=main, cmd=["sh", "-c", "echo here; exit 5"], timeout=20)
        said = await self.runtime.ExecSync(execute, timeout=30.0)
        self.assertEqual((said.stdout, said.exit_code), (b"here\n", 5))
        await self.runtime.StartContainer(cri.StartContainerRequest(container_id=waiting), timeout=30.0)
        self.assertEqual((await self.in_state(waiting, cri.CONTAINER_EXITED)).exit_code, 4)
        late = await self.run_container(pod, self.box("late", script="exit 6"))
        self.assertEqual((await self.in_state(late, cri.CONTAINER_EXITED)).exit_code, 6)
        stats = await self.runtime.ContainerStats(cri.ContainerStatsRequest(container_id=main), timeout=30.0)
        self.assertEqual(stats.stats.attributes.id, main)
        stop = cri.StopContainerRequest(container_id=main, timeout=0)
        await self.runtime.StopContainer(stop, timeout=30.0)
        another = await self.run_container(await self.run_pod("another"), self.box("main", script="exit 7"))
        self.assertEqual((await self.in_state(another, cri.CONTAINER_EXITED)).exit_code, 7)
        for sandbox in await self.sandboxes():
            await self.stop_pod(sandbox.id)
            await self.remove_pod(sandbox.id)
        self.assertEqual((await self.sandboxes(), await self.containers(), await self.vms()), ([], [], []))
        self.assertNotIn("Traceback", self.log)

    async def release(self) -> str:
        """Which one the daemon is of."""
        return str((await self.runtime.Version(cri.VersionRequest(), timeout=10.0)).runtime_version)

    def counted(self) -> list[int]:
        """The numbers in the log of the container that counts."""
        lines = (self.log_directory / "web" / "main.log").read_text().splitlines()
        return [int(line.split(" ", 3)[3]) for line in lines]

    async def test_the_release_before_refuses_a_store_of_a_later_schema_and_leaves_all_as_it_is(self) -> None:
        """As the one before would this one's, should this one have changed it."""
        await self.start()
        pod = await self.run_pod()
        await self.kill()
        later = len(MIGRATIONS) + 1
        self.schema(later)
        self.tree = await deferToThread(previous_release)
        self.process = self.spawn()
        self.assertNotEqual(await self.ended(60.0), 0)
        words = rf"has schema {later}, this release knows up to \d+: install the newer release again"
        self.assertRegex(self.log, words)
        self.assertEqual(len(await self.vms()), 1)
        self.schema(len(MIGRATIONS))
        self.tree = ROOT
        await self.start()
        self.assertEqual([each.id for each in await self.sandboxes(state=READY)], [pod])

    def schema(self, number: int) -> None:
        """Have the store say that it has this schema."""
        with contextlib.closing(sqlite3.connect(self.root / "state" / FILE)) as connection:
            connection.execute(f"PRAGMA user_version = {number}")
