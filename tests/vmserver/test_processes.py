# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import subprocess
from unittest import skipIf

from twisted.internet.process import Process
from twisted.trial.unittest import TestCase

from infranetes_common.reactors import installed
from vmserver.containers.child_exec import exec_sync
from vmserver.processes import as_command, oom_score_adj

reactor = installed()


class AsCommandTests(TestCase):
    """The shell around a container's command."""

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


class StartTests(TestCase):
    """What it costs the agent to start a command."""

    @skipIf(not hasattr(Process, "_trySpawnInsteadOfFork"), "this Twisted can only fork")
    async def test_the_agent_is_not_forked(self) -> None:
        def fork() -> int:
            raise AssertionError("fork takes longer the more memory the agent has")

        self.patch(os, "fork", fork)
        result = await exec_sync(reactor, ["true"], {}, "/", oom_score_adj(os.getpid()), 10.0, 1024)
        self.assertEqual(result.exit_code, 0)
