# SPDX-License-Identifier: Apache-2.0
"""File servers that have gone: access to a mount of theirs hangs. Other pods are not affected."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from infranetes_common.wire import cri
from tests.harness.durations import slow
from tests.harness.needs import needs_netns
from tests.infranetes.daemon.case import DaemonCase
from tests.support.fuse import HangingMounts
from txgrpc import Code

PODS = 12  # more than the reactor has threads
NEVER = 1000.0  # a deadline of the daemon's that lets a test fail if anything waits for it
SOON = 2.0


@slow(12, "twelve pods wait for deadlines that a busy machine must not reach before")
@needs_netns
class HangingTests(DaemonCase):
    def setUp(self) -> None:
        super().setUp()
        self.files = Path(os.path.realpath(self.root)) / "kubelet"
        self.hanging = [self.files / f"hanging-{number}" for number in range(PODS)]
        self.server = HangingMounts(*self.hanging)
        self.addCleanup(self.server.end)

    def mount(self, path: Path) -> Any:
        return cri.Mount(container_path="/mnt", host_path=str(path))

    def log_of(self, pod: str) -> str:
        return (self.log_directory / pod / "main.log").read_text()

    async def all_say(self, words: str, since: int) -> None:
        """Wait until the log says so of each pod that hangs except the first, which is stopped."""
        wanted = [f"{path} {words}" for path in self.hanging[1:]]
        await self.until(lambda: all(each in self.log[since:] for each in wanted), words, 40.0)

    async def run_all(self) -> tuple[list[str], list[str]]:
        """Run the pods, with mounts that will hang. Return their ids and their containers'."""
        sandboxes, containers = [], []
        for number, path in enumerate(self.hanging):
            sandbox = await self.run_pod(f"hanging-{number}")
            config = self.box(script="sleep 1000", mounts=[self.mount(path)])
            containers.append(await self.run_container(sandbox, config))
            sandboxes.append(sandbox)
        return sandboxes, containers

    async def hang(self) -> None:
        """Let the file servers go, and wait until the daemon waits for each of them."""
        self.server.hang()
        await self.until(lambda: self.server.awaited, "the daemon looks at all mounts", 60.0)

    async def test_those_that_hang_stop_no_other_pods_launch_log_or_end(self) -> None:
        self.constants = {
            "infranetes.volumes.published_mounts.FIND_SECONDS": NEVER,
            "infranetes.volumes.sync.SOURCE_SECONDS": NEVER,
            "infranetes.volumes.volumes.FIND_SECONDS": NEVER,
        }
        await self.start()
        await self.run_all()
        lines = "i=0; while sleep 0.1; do i=$((i+1)); echo line $i; done"
        await self.run_container(await self.run_pod("talking"), self.box(script=lines))
        await self.until(lambda: "line 1" in self.log_of("talking"), "a line")
        await self.hang()
        shared = self.files / "shared"
        for attempt in range(2):
            written = self.log_of("talking").count("line")
            name = f"other-{attempt}"
            sandbox = await self.run_pod(name)
            config = self.box(script="echo last words; exit 3", mounts=[self.mount(shared)])
            container = await self.run_container(sandbox, config)
            await self.in_state(container, cri.CONTAINER_EXITED)
            self.assertIn("last words", self.log_of(name))
            await self.stop_pod(sandbox)
            await self.until(lambda: self.log_of("talking").count("line") > written, "a line")  # noqa: B023
        self.assertTrue(self.server.awaited)

    async def test_what_is_done_with_those_that_hang(self) -> None:
        self.constants = {
            "infranetes.volumes.sync.SOURCE_SECONDS": SOON,
            "infranetes.volumes.volumes.FIND_SECONDS": SOON,
            "infranetes.volumes.writeback.STILL_SECONDS": SOON,
        }
        await self.start()
        sandboxes, containers = await self.run_all()
        await self.hang()
        config = self.box("second", mounts=[self.mount(self.hanging[0])])
        request = cri.CreateContainerRequest(pod_sandbox_id=sandboxes[0], config=config)
        call = self.runtime.CreateContainer(request, timeout=60.0)
        message = await self.refused(Code.DEADLINE_EXCEEDED, call)
        self.assertIn(f"config.mounts[0] ({self.hanging[0]} at /mnt): ", message)
        self.assertIn("does not answer", message)
        stop = cri.StopContainerRequest(container_id=containers[1])
        await self.runtime.StopContainer(stop, timeout=60.0)
        status = await self.in_state(containers[1], cri.CONTAINER_EXITED)
        self.assertEqual(status.reason, "VolumesNotWritten")
        self.assertIn(f"not everything that it wrote is on the node: {self.hanging[1]}: ", status.message)
        await self.stop_pod(sandboxes[0])

        await self.all_say("is not copied to the VM", 0)
        assert self.process is not None
        self.process.terminate()
        await self.ended()
        known = len(self.log)
        await self.start()
        ready = cri.PodSandboxStateValue(state=cri.SANDBOX_READY)
        self.assertEqual(len(await self.sandboxes(state=ready)), PODS - 1)
        await self.all_say("is not copied to the VM", known)
        self.server.go_on()
        await self.all_say("is copied again", known)
