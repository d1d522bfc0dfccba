# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import errno
import os
import subprocess
from unittest import skipIf

from twisted.internet.process import Process
from twisted.trial.unittest import SynchronousTestCase, TestCase

from infranetes_common.errors import InvalidArgument, Unavailable
from infranetes_common.processes import as_command, kill_family, oom_score_adj
from infranetes_common.reactors import installed
from vmserver.containers.child_exec import exec_sync
from vmserver.containers.child_sessions import ExecSession
from vmserver.containers.interface import Streams

reactor = installed()


class AsCommandTests(TestCase):
    """A container's command is started by a shell, in the directory that was asked for."""

    def directory(self, cwd: str) -> str:
        command = as_command(["/bin/pwd"], cwd, oom_score_adj(os.getpid()))
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def test_the_command_runs_in_its_directory(self) -> None:
        self.assertEqual(self.directory("/usr/lib"), "/usr/lib")

    def test_a_relative_directory_begins_at_the_root(self) -> None:
        self.assertEqual(self.directory("usr"), "/usr")
        self.assertEqual(self.directory(""), "/")

    def test_a_missing_directory_ends_it(self) -> None:
        self.assertRaises(subprocess.CalledProcessError, self.directory, "/no such directory")


class FamilyTests(SynchronousTestCase):
    """`kill_family`, whose signals are noted and not sent."""

    def setUp(self) -> None:
        self.killed: list[int] = []
        self.patch(os, "kill", lambda pid, signal: self.killed.append(pid))
        self.patch(os, "killpg", lambda group, signal: self.killed.append(-group))

    def test_never_that_of_init_of_the_kernel_or_of_everybody(self) -> None:
        for leader in (1, 0, -1):
            kill_family(leader)
            self.assertEqual(self.killed, [], leader)

    def test_never_the_agent_itself(self) -> None:
        with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
            kill_family(os.getpid())
        self.assertIn(child.pid, self.killed)
        self.assertNotIn(os.getpid(), self.killed)

    def test_only_the_leader_of_a_group_takes_the_group_with_it(self) -> None:
        for leads in (False, True):
            self.killed.clear()
            with subprocess.Popen(["cat"], stdin=subprocess.PIPE, start_new_session=leads) as child:
                kill_family(child.pid)
            self.assertEqual(self.killed, [-child.pid, child.pid] if leads else [child.pid])


class StartTests(TestCase):
    """What it costs the agent to start a command."""

    @skipIf(not hasattr(Process, "_trySpawnInsteadOfFork"), "this Twisted can only fork")
    async def test_the_agent_is_not_forked(self) -> None:
        def fork() -> int:
            raise AssertionError("fork takes longer the more memory the agent has")

        self.patch(os, "fork", fork)
        result = await exec_sync(reactor, ["true"], {}, "/", oom_score_adj(os.getpid()), 10.0, 1024)
        self.assertEqual(result.exit_code, 0)

    @skipIf(not hasattr(Process, "_trySpawnInsteadOfFork"), "a forked child reports it by itself")
    async def test_a_command_that_is_too_long_is_refused(self) -> None:
        mine = oom_score_adj(os.getpid())
        command = ["true", "x" * 200_000]
        with self.assertRaisesRegex(InvalidArgument, "argument list too long"):
            await exec_sync(reactor, command, {}, "/", mine, 10.0, 1024)
        streams = Streams(stdin=False, stdout=True, stderr=True, tty=False)
        with self.assertRaisesRegex(InvalidArgument, "argument list too long"):
            ExecSession.spawn(reactor, command, {}, "/", mine, streams)

    async def test_the_kernel_starts_no_process(self) -> None:
        def refuse(*_: object, **__: object) -> int:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

        self.patch(os, "fork", refuse)
        self.patch(os, "posix_spawnp", refuse)
        with self.assertRaisesRegex(Unavailable, "temporarily unavailable"):
            await exec_sync(reactor, ["true"], {}, "/", oom_score_adj(os.getpid()), 10.0, 1024)
