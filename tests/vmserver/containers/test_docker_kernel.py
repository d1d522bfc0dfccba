# SPDX-License-Identifier: Apache-2.0
"""Containers that the kernel killed are recognized by its log."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from twisted.trial.unittest import TestCase

from infranetes_common.reactors import installed
from vmserver.containers.docker.kernel import KernelLog

DEAD, ALIVE = "d" * 64, "a" * 64


def killing(id: str) -> str:
    """Return a record as Linux 6.1 writes it."""
    return (
        "6,812,5140900,-;oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=docker-"
        f"{ALIVE}.scope,mems_allowed=0,oom_memcg=/system.slice/docker-{id}.scope,"
        f"task_memcg=/system.slice/docker-{id}.scope/container,task=dd,pid=734,uid=0\n"
    )


def inspected(id: str, exit_code: int = 137, oom_killed: bool = False) -> Any:
    return {"Id": id, "State": {"ExitCode": exit_code, "OOMKilled": oom_killed}}


class KernelLogTests(TestCase):
    def setUp(self) -> None:
        self.path = Path(self.mktemp())
        self.path.write_text("6,1,0,-;Linux version 6.1\n")
        self.kernel = KernelLog(installed(), self.path)
        self.addCleanup(self.kernel.close)

    async def killed(self, found: Any) -> bool:
        corrected = await self.kernel.corrected(found)
        self.assertEqual(corrected["Id"], found["Id"])
        return bool(corrected["State"]["OOMKilled"])

    async def test_one_that_the_log_names_was_killed(self) -> None:
        self.path.write_text(killing(DEAD))
        self.assertTrue(await self.killed(inspected(DEAD)))
        self.assertFalse(await self.killed(inspected(ALIVE)))

    async def test_what_is_written_later_is_read_later(self) -> None:
        self.assertFalse(await self.killed(inspected(DEAD)))
        with self.path.open("a") as log:
            log.write(killing(DEAD))
        self.assertTrue(await self.killed(inspected(DEAD)))
        self.assertTrue(await self.killed(inspected(DEAD)))

    async def test_another_exit_code_is_not_looked_up(self) -> None:
        self.path.write_text(killing(DEAD))
        self.assertFalse(await self.killed(inspected(DEAD, exit_code=1)))

    async def test_what_docker_reports_is_not_changed(self) -> None:
        self.assertTrue(await self.killed(inspected(ALIVE, oom_killed=True)))

    async def test_without_a_log_docker_alone_decides(self) -> None:
        self.path.unlink()
        self.assertFalse(await self.killed(inspected(DEAD)))

    async def test_the_kernels_own_log_is_read_to_its_end_and_no_further(self) -> None:
        self.kernel = KernelLog(installed())
        self.addCleanup(self.kernel.close)
        self.assertFalse(await self.killed(inspected(ALIVE)))
        self.assertTrue(os.path.exists("/dev/kmsg"))

    async def test_once_closed_it_is_opened_again(self) -> None:
        self.path.write_text(killing(DEAD))
        self.assertTrue(await self.killed(inspected(DEAD)))
        self.kernel.close()
        self.kernel.close()
        self.assertTrue(await self.killed(inspected(DEAD)))
