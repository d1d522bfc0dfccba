# SPDX-License-Identifier: Apache-2.0
"""The fake ContainerProvider: the contract, and what it does beyond."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

from twisted.trial.unittest import TestCase

from infranetes_common import reactors
from infranetes_common.errors import FailedPrecondition
from infranetes_common.wire import cri
from infranetes_simulation.containers.layered import LayeredFakeProvider
from infranetes_simulation.containers.provider import FakeProvider
from tests.contract.container_output import ArchiveContract, LayersContract, LogContract
from tests.contract.container_provider import ExecContract, LifecycleContract
from tests.contract.container_provider_case import ContainerProviderCase, pieces
from tests.contract.container_sessions import TERMINAL, SessionContract
from tests.contract.container_usage import UsageContract
from tests.harness.needs import needs_programs
from vmserver.layers.arrival import BroughtLayer


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@needs_programs("busybox")
class FakeCase(ContainerProviderCase):
    """Its state is in the test's directory."""

    def make_provider(self) -> Any:
        return FakeProvider(reactors.installed(), Path(self._directory))

    async def setUp(self) -> None:
        self._directory = tempfile.mkdtemp(prefix="fake-", dir="/dev/shm")
        await super().setUp()

    async def tearDown(self) -> None:
        # trial runs cleanups first
        try:
            await super().tearDown()
        finally:
            shutil.rmtree(self._directory)


class FakeLifecycleTests(FakeCase, LifecycleContract, TestCase):
    """Create, start, stop, remove, update, list."""


class FakeExecTests(FakeCase, ExecContract, TestCase):
    """ExecSync."""


class FakeSessionTests(FakeCase, SessionContract, TestCase):
    """Live sessions."""

    async def test_a_command_that_lets_go_of_its_terminal_is_not_hung_up(self) -> None:
        heard = await self.heard(TERMINAL, "sh", "-c", "exec <&- >&- 2>&-; sleep 0.2; exit 5")
        self.assertEqual(await heard.over, 5)


class FakeUsageTests(FakeCase, UsageContract, TestCase):
    """Stats."""

    counts_written = False

    async def test_without_a_command_nothing_is_used(self) -> None:
        usage = (await self.used(await self.run_container())).usage
        self.assertGreater(usage.time_nanos, 0)
        self.assertEqual((usage.processes, usage.cpu.total_nanos, usage.memory.usage), (0, 0, 0))


class FakeLogTests(FakeCase, LogContract, TestCase):
    """ReadLog."""


class FakeImageTests(FakeCase, ArchiveContract, TestCase):
    """Images."""

    keeps_layers = False


class FakeOwnTests(FakeCase, TestCase):
    """What only this provider does."""

    async def test_without_a_command_it_runs_until_it_is_stopped_and_has_no_process(self) -> None:
        id = await self.run_container()
        state = await self.state(id)
        self.assertEqual((state.state, state.pid), (cri.CONTAINER_RUNNING, 0))
        await self.restarted()
        self.assertEqual(await self.state(id), state)
        stopped = await self.provider.stop_container(id, 10)
        self.assertEqual((stopped.state, stopped.exit_code), (cri.CONTAINER_EXITED, 0))
        await self.restarted()
        self.assertEqual(await self.state(id), stopped)

    async def test_following_one_without_a_command_ends_with_it(self) -> None:
        from twisted.internet.defer import Deferred

        id = await self.run_container()
        following = Deferred.fromCoroutine(self.lines(id, follow=True))
        self.assertFalse(following.called)
        await self.provider.stop_container(id, 0)
        self.assertEqual(await following, [])

    async def test_a_killed_shim_ends_the_container_and_its_process(self) -> None:
        id = await self.run_container("sleep", "600")
        state = await self.state(id)
        shim = self.provider._containers[id].shim
        os.kill(shim, signal.SIGKILL)
        ended = await self.ended(id)
        self.assertEqual((ended.exit_code, ended.reason), (137, "Error"))
        await self.until(lambda: not _lives(state.pid), "its process is gone")

    async def test_a_start_waits_for_the_one_that_an_earlier_agent_began(self) -> None:
        id = await self.create("sleep", "600")
        with open(os.path.join(self._directory, id + ".begun"), "w") as begun:
            fcntl.flock(begun, fcntl.LOCK_EX)
            begun.write("begun\n")
            begun.flush()
            starting = self.provider.start_container(id)
            inode = str(os.fstat(begun.fileno()).st_ino)

            def waits() -> bool:
                locks = Path("/proc/locks").read_text().splitlines()
                return any("->" in line and f":{inode} " in line for line in locks)

            await self.until(waits, "the second shim waits")
            self.assertFalse(starting.called)
            ended = {"exit_code": 7, "started_at": 1, "finished_at": 2, "error": ""}
            Path(self._directory, id + ".exit").write_text(json.dumps(ended))
        state = await starting
        self.assertEqual((state.state, state.exit_code), (cri.CONTAINER_EXITED, 7))

    async def test_an_agent_killed_while_starting_one_does_not_start_it_twice(self) -> None:
        marker = os.path.join(self._directory, "started")
        id = await self.create("sh", "-c", f"echo x >> {marker}; sleep 600")
        first = self.provider.start_container(id)
        second = (await self.started()).start_container(id)
        for each in (first, second):
            self.assertEqual((await each).state, cri.CONTAINER_RUNNING)
        await self.until(lambda: os.path.exists(marker) and os.path.getsize(marker), "it runs")
        self.assertEqual(Path(marker).read_text(), "x\n")


class LayeredFakeTests(FakeCase, LayersContract, TestCase):
    """Images that are made of layers. They are not mounted, so any bytes will do for one."""

    def make_provider(self) -> Any:
        return LayeredFakeProvider(reactors.installed(), Path(self._directory))

    async def load(self, built: Any) -> None:
        for blob, diff_id in zip(built.layers, built.diff_ids, strict=True):
            layer = BroughtLayer(diff_id, len(blob.data), blob.digest)
            await self.provider.layers.put(layer, pieces(blob.data))
        await self.provider.add_image(built.id, built.config.data)

    async def test_a_container_needs_an_image_that_is_there(self) -> None:
        await self.create("true")
        self.image_id = "sha256:" + "c" * 64
        await self.refused(FailedPrecondition, self.create("true"))
