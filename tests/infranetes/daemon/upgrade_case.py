# SPDX-License-Identifier: Apache-2.0
"""What must survive the replacement of a node's release by another."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from infranetes_common.wire import cri
from tests.infranetes.daemon.case import DaemonCase
from txgrpc import Code, GrpcError

_COUNTS = "i=0; while :; do echo $i; i=$((i+1)); sleep 0.1; done"


class UpgradeCase(DaemonCase):
    """A node with pods whose release is replaced."""

    timeout = 300

    async def lives_on(self, first: Path, then: Path) -> None:
        """Check that the daemon of one tree goes on with the pods of another tree's daemon, which is killed.

        :param first: the tree whose daemon launches the VMs."""

        async def replace() -> None:
            await self.kill()
            self.tree = then
            await self.start()

        self.tree = first
        await self.start()
        await self.check_pods_live_on(replace)

    async def check_pods_live_on(self, replace: Callable[[], Awaitable[None]]) -> None:
        """Check that the next daemon has the first one's pods and agents, and can do everything with them.

        :param replace: replaces the daemon by the other release's."""
        before = await self.release()
        pod, stopped = await self.run_pod(), await self.run_pod("stopped")
        main = await self.run_container(pod, self.box(script=_COUNTS))
        ended = await self.run_container(pod, self.box("ended", script="exit 3"))
        await self.in_state(ended, cri.CONTAINER_EXITED)
        waiting = await self.create(pod, self.box("waiting", script="exit 4"))
        await self.stop_pod(stopped)
        await self.until(lambda: len(self.counted()) > 3, "the container counts")
        started = (await self.container_status(main)).started_at

        await replace()
        self.assertNotEqual(await self.release(), before)
        listed = {each.id: each.state for each in await self.sandboxes()}
        self.assertEqual(listed, {pod: cri.SANDBOX_READY, stopped: cri.SANDBOX_NOTREADY})
        self.assertEqual((await self.in_state(main, cri.CONTAINER_RUNNING)).started_at, started)
        self.assertEqual((await self.container_status(ended)).exit_code, 3)
        seen = len(self.counted())
        await self.until(lambda: len(self.counted()) > seen + 3, "its log goes on")
        self.assertEqual(self.counted(), list(range(len(self.counted()))))

        execute = cri.ExecSyncRequest(container_id=main, cmd=["sh", "-c", "echo here; exit 5"])
        said = await self.runtime.ExecSync(execute, timeout=30.0 * self.patience)
        self.assertEqual((said.stdout, said.exit_code), (b"here\n", 5))
        await self.runtime.StartContainer(
            cri.StartContainerRequest(container_id=waiting), timeout=30.0 * self.patience
        )
        self.assertEqual((await self.in_state(waiting, cri.CONTAINER_EXITED)).exit_code, 4)
        late = await self.run_container(pod, self.box("late", script="exit 6"))
        self.assertEqual((await self.in_state(late, cri.CONTAINER_EXITED)).exit_code, 6)
        self.assertEqual((await self.figures(main)).attributes.id, main)
        stop = cri.StopContainerRequest(container_id=main, timeout=0)
        await self.runtime.StopContainer(stop, timeout=30.0 * self.patience)
        another = await self.run_container(await self.run_pod("another"), self.box("main", script="exit 7"))
        self.assertEqual((await self.in_state(another, cri.CONTAINER_EXITED)).exit_code, 7)
        for sandbox in await self.sandboxes():
            await self.stop_pod(sandbox.id)
            await self.remove_pod(sandbox.id)
        self.assertEqual((await self.sandboxes(), await self.containers(), await self.vms()), ([], [], []))
        self.assertNotIn("Traceback", self.log)

    async def figures(self, container: str) -> Any:
        """Return a container's figures, asking again as kubelet does while its VM gives none in time."""
        until = time.monotonic() + 30.0 * self.patience
        while True:
            try:
                request = cri.ContainerStatsRequest(container_id=container)
                return (await self.runtime.ContainerStats(request, timeout=30.0)).stats
            except GrpcError as error:
                if error.code is not Code.UNAVAILABLE or time.monotonic() > until:
                    raise
            await self.sleep(0.2)

    async def release(self) -> str:
        """Return the daemon's release."""
        return str((await self.runtime.Version(cri.VersionRequest(), timeout=10.0)).runtime_version)

    def counted(self) -> list[int]:
        """Return the numbers in the log of the container that counts."""
        lines = (self.log_directory / "web" / "main.log").read_text().splitlines()
        return [int(line.split(" ", 3)[3]) for line in lines]
