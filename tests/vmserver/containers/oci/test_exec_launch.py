# SPDX-License-Identifier: Apache-2.0
"""How crun is run for a command: where, with what words, and in which cgroup."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.process import Process
from twisted.internet.protocol import ProcessProtocol
from twisted.python.failure import Failure
from twisted.trial.unittest import TestCase

from infranetes_common.concurrency import within
from infranetes_common.reactors import installed
from tests.support.waiting import until
from vmserver.containers.child_exec import exit_code
from vmserver.containers.oci.cgroup import Cgroup
from vmserver.containers.oci.exec_launch import CommandGroups, Launch
from vmserver.containers.oci.runtime import Crun, Status
from vmserver.containers.programs import ENVIRONMENT

reactor = installed()

CRUN = """#!/bin/sh
echo "$@" >{said}/words
pwd >{said}/directory
tr '\\0' '\\n' </proc/self/environ >{said}/environment
cat /proc/self/fd/3 >{said}/process
{then}
"""
GONE = 2**22 + 1  # no process has this number


class Child(ProcessProtocol):
    """A run of crun."""

    transport: Process

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self.ended: Deferred[int] = Deferred()

    def connectionMade(self) -> None:
        self._launch.began(self.transport)

    def processEnded(self, reason: Failure) -> None:
        self._launch.over()
        self.ended.callback(exit_code(reason))


class LaunchTests(TestCase):
    """A script stands for crun, and plain directories for cgroups of version 2."""

    def setUp(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="launch-"))
        self.addCleanup(shutil.rmtree, self.directory)
        self.groups = self.directory / "cgroups" / "c1"
        self.groups.mkdir(parents=True)
        self.controllers = self.groups.parent / "cgroup.controllers"
        self.controllers.touch()

    def launch(self, pid: int = GONE, then: str = "", runs: Any = reactor) -> Launch:
        """Return the launch of a command in a container. :param pid: the container's first process."""
        program = self.directory / "crun"
        program.write_text(CRUN.format(said=self.directory, then=then))
        program.chmod(0o755)
        crun = Crun(runs, self.directory / "run", str(program))
        status = Status(pid, 1, Cgroup("c1", self.groups.parent), waiting=False)
        return Launch(runs, crun, "c1", status, b"the process", 0, self.directory, CommandGroups(), 0.1)

    def run_it(self, launch: Launch, console: Path | None = None) -> Child:
        made = Child(launch)
        launch.spawn(made, {0: None, 1: None, 2: None}, console)
        return made

    async def end(self, child: Child) -> int:
        return await within(reactor, 20.0, child.ended, "crun")

    def said(self, what: str) -> str:
        return (self.directory / what).read_text()

    async def test_it_reads_the_process_from_a_pipe_and_begins_at_the_root_with_nothing_of_the_agents(
        self,
    ) -> None:
        self.assertEqual(await self.end(self.run_it(self.launch())), 0)
        self.assertEqual((self.said("process"), self.said("directory")), ("the process", "/\n"))
        names = {line.partition("=")[0] for line in self.said("environment").splitlines()}
        self.assertLessEqual(names, {*ENVIRONMENT, "PWD", "SHLVL", "_", "OLDPWD"})

    async def test_it_is_in_a_cgroup_of_its_own_which_goes_with_it(self) -> None:
        child = self.run_it(self.launch(then=f"ls {self.groups} >{self.directory}/groups"))
        self.assertEqual(await self.end(child), 0)
        (group,) = self.said("groups").split()
        self.assertIn(f"--cgroup={group}", self.said("words").split())
        self.assertEqual(os.listdir(self.groups), [])

    async def test_it_is_killed_with_all_of_its_cgroup(self) -> None:
        launch = self.launch(then="exec sleep 600")
        child = self.run_it(launch)
        await until(lambda: (self.directory / "process").exists(), "it runs")
        launch.kill()
        self.assertEqual(await self.end(child), 137)
        (group,) = self.groups.iterdir()
        self.assertEqual((group / "cgroup.kill").read_text(), "1")

    async def test_with_cgroups_of_version_1_it_is_in_its_containers(self) -> None:
        self.controllers.unlink()
        await self.end(self.run_it(self.launch()))
        self.assertNotIn("--cgroup", self.said("words"))

    async def test_where_it_hands_over_a_terminal_and_writes_its_pid(self) -> None:
        await self.end(self.run_it(self.launch()))
        self.assertNotIn("--console-socket", self.said("words"))
        self.assertNotIn("--pid-file", self.said("words"))
        child = self.run_it(self.launch(pid=os.getpid()), Path("/console"))
        await self.end(child)
        words = self.said("words").split()
        self.assertIn("--console-socket=/console", words)
        self.assertIn(f"--pid-file={self.directory}/", self.said("words"))
        self.assertEqual(words[-1], "c1")

    def test_if_it_can_not_be_run_no_cgroup_is_left(self) -> None:
        class Full:
            def spawnProcess(self, *_: object, **__: object) -> None:
                raise BlockingIOError("no more processes")

        launch = self.launch(runs=Full())
        before = len(os.listdir("/proc/self/fd"))
        self.assertRaises(BlockingIOError, self.run_it, launch)
        self.assertEqual((os.listdir(self.groups), len(os.listdir("/proc/self/fd"))), ([], before))

    def test_what_crun_refuses_has_the_exit_code_of_shells(self) -> None:
        for said, code, expected in (
            (b"executable file `x` not found in $PATH", 1, 127),
            (b"open executable: Permission denied", 255, 126),
            (b"open executable: Permission denied", 3, 3),
            (b"something else", 1, 1),
            (b"", 255, 255),
            (b"exec\xff", 1, 126),
            (b"x" * 1024 + b"exec", 1, 1),
        ):
            launch = self.launch()
            for at in range(0, len(said), 10):
                launch.heard(said[at : at + 10])
            self.assertEqual(launch.exit_code(code), expected, said[:40])
