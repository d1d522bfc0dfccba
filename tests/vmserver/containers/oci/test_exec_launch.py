# SPDX-License-Identifier: Apache-2.0
"""How crun is run for a command: where, with what words, and in which cgroup."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

from twisted.internet.defer import Deferred
from twisted.internet.process import Process
from twisted.internet.protocol import ProcessProtocol
from twisted.internet.task import Clock
from twisted.python.failure import Failure
from twisted.trial.unittest import TestCase

from infranetes_common import spawning
from infranetes_common.commands import ENVIRONMENT, exit_code, shell_code
from infranetes_common.concurrency import within
from infranetes_common.errors import Unavailable
from infranetes_common.processes import family, process_state
from infranetes_common.reactors import installed
from tests.support.waiting import until
from vmserver.containers.oci.cgroup import Cgroup
from vmserver.containers.oci.exec_launch import CommandGroups, ExecLaunch, FirstProcess
from vmserver.containers.oci.runtime import Crun, Status

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

    def __init__(self, launch: ExecLaunch) -> None:
        self._launch = launch
        self.ended: Deferred[int] = Deferred()

    def connectionMade(self) -> None:
        self._launch.began(self.transport)

    def processEnded(self, reason: Failure) -> None:
        self._launch.over()
        self.ended.callback(shell_code(exit_code(reason)))


class FirstProcessTests(TestCase):
    """A shell stands for a crun that has inherited what a command leaves behind."""

    def setUp(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="first-"))
        self.addCleanup(shutil.rmtree, self.directory)
        self.clock = Clock()
        self.first = FirstProcess(self.clock, self.directory / "pid", 0.5)
        self.addCleanup(self.first.close)
        self.crun = self.child("sh", "-c", "sleep 600 & sleep 600 & echo; wait", stdout=subprocess.PIPE)
        assert self.crun.stdout is not None
        self.crun.stdout.readline()
        self.left = family(self.crun.pid)[1:]
        self.addCleanup(self.kill_left)
        self.first.watch(self.crun.pid)

    def child(self, *command: str, stdout: int | None = None) -> subprocess.Popen[bytes]:
        made = subprocess.Popen(command, stdout=stdout)
        self.addCleanup(made.communicate)
        self.addCleanup(made.kill)
        return made

    def kill_left(self) -> None:
        for pid in self.left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def look(self, times: int = 1) -> None:
        self.clock.pump([0.5] * times)

    def living(self) -> list[int]:
        """Return the processes that were left behind and run."""
        return [pid for pid in self.left if process_state(pid)[0] not in ("", "Z", "X")]

    async def test_what_the_command_leaves_behind_is_killed_once_it_has_ended(self) -> None:
        command = self.child("sleep", "600")
        self.first.path.write_text(str(command.pid))
        self.look(3)
        command.kill()
        command.wait()
        self.assertEqual(len(self.living()), 2, "the command has run so far")
        self.look()
        await until(lambda: not self.living(), "they have ended")
        self.assertEqual(self.crun.wait(20), 0, "crun ends by itself")

    async def test_one_that_had_ended_before_anybody_looked_has_left_them_too(self) -> None:
        command = self.child("true")
        command.wait()
        self.first.path.write_text(f"{command.pid}\n")
        self.look()
        await until(lambda: not self.living(), "they have ended")

    def test_before_crun_has_written_the_pid_nothing_is_killed(self) -> None:
        self.look(2)
        for text in ("", "x"):
            self.first.path.write_text(text)
            self.look()
        self.assertEqual(len(self.living()), 2)

    def test_what_ends_as_it_is_killed_is_no_failure(self) -> None:
        killed: list[int] = []

        def gone(pid: int, number: int) -> None:
            killed.append(pid)
            raise ProcessLookupError

        self.first.path.write_text(str(GONE))
        patched = self.patch(os, "kill", gone)
        self.look()
        patched.restore()
        self.assertEqual(killed, self.left)

    def test_once_closed_it_looks_no_more_and_has_no_file(self) -> None:
        self.first.path.write_text(str(GONE))
        for _ in range(2):
            self.first.close()
        self.look()
        self.assertEqual((len(self.living()), self.clock.getDelayedCalls()), (2, []))
        self.assertEqual(os.listdir(self.directory), [])


class LaunchTests(TestCase):
    """A script stands for crun, and plain directories for cgroups of version 2."""

    def setUp(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="launch-"))
        self.addCleanup(shutil.rmtree, self.directory)
        self.groups = self.directory / "cgroups" / "c1"
        self.groups.mkdir(parents=True)
        self.controllers = self.groups.parent / "cgroup.controllers"
        self.controllers.touch()

    def launch(self, pid: int = GONE, then: str = "", group: str | None = "c1") -> ExecLaunch:
        """Return the launch of a command in a container. :param pid: the container's first process."""
        program = self.directory / "crun"
        program.write_text(CRUN.format(said=self.directory, then=then))
        program.chmod(0o755)
        crun = Crun(reactor, self.directory / "run", str(program))
        cgroup = None if group is None else Cgroup(group, self.groups.parent)
        status = Status(pid, 1, cgroup, waiting=False)
        return ExecLaunch(
            reactor, crun, "c1", status, b"the process", 0, self.directory, CommandGroups(), 0.1
        )

    def run_it(self, launch: ExecLaunch, console: Path | None = None) -> Child:
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
        found = dict(line.split("=", 1) for line in self.said("environment").splitlines())
        for of_shell in ("PWD", "OLDPWD", "SHLVL", "_"):
            found.pop(of_shell, None)
        self.assertEqual(found, ENVIRONMENT)

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

    async def test_in_a_container_without_a_cgroup_it_has_none(self) -> None:
        launch = self.launch(group=None)
        self.assertEqual(await self.end(self.run_it(launch)), 0)
        self.assertNotIn("--cgroup", self.said("words"))

    async def test_among_the_vms_own_processes_what_a_command_leaves_behind_does_not_hold_it(self) -> None:
        """The script writes the pid of a command that ends, and waits for another process, as crun does."""
        write = 'for word; do case $word in --pid-file=*) true & echo $! >"${word#*=}";; esac; done'
        child = self.run_it(self.launch(pid=os.getpid(), then=f"{write}; sleep 600 & wait; exit 3"))
        self.assertEqual(await self.end(child), 3)
        self.assertEqual(list(self.directory.glob("*.pid")), [])

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
        def full(*_: object) -> int:
            raise BlockingIOError(errno.EAGAIN, "no more processes")

        self.patch(spawning, "_posix_spawn", full)
        launch = self.launch()
        before = len(os.listdir("/proc/self/fd"))
        self.assertRaisesRegex(Unavailable, "no more processes", self.run_it, launch)
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
