# SPDX-License-Identifier: Apache-2.0
"""Programs that images are built with: how they end when their builder is asked to end."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from infranetes.guest import programs
from infranetes_common.errors import InfranetesError


class _InterruptedStart(subprocess.Popen[str]):
    """A program whose start is interrupted once it runs, before whoever starts it knows of it."""

    number: signal.Signals
    started: list[int]

    def __init__(self, *arguments: Any, **keywords: Any) -> None:  # Any: Popen's own
        super().__init__(*arguments, **keywords)
        self.started.append(self.pid)
        os.kill(os.getpid(), self.number)


class InterruptedTests(SynchronousTestCase):
    def setUp(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self.addCleanup(signal.signal, number, signal.signal(number, signal.default_int_handler))

    def test_one_that_is_interrupted_while_it_starts_is_ended(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            _InterruptedStart.number, _InterruptedStart.started = number, []
            self.patch(subprocess, "Popen", _InterruptedStart)
            with self.assertRaises(KeyboardInterrupt):
                programs.run("sleep", "1000")
            [pid] = _InterruptedStart.started
            self.assertRaises(ProcessLookupError, os.kill, pid, 0)
            self.assertIs(signal.getsignal(number), signal.default_int_handler)

    def test_what_its_builder_ignores_it_ignores_too(self) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        told: list[str] = []
        programs.run("sh", "-c", "kill -INT $$; echo I: still here", progress=told.append)
        self.assertEqual(told, ["still here"])

    def test_one_that_can_not_be_started_leaves_the_signals_as_they_were(self) -> None:
        self.assertRaises(FileNotFoundError, programs.run, f"no-such-{secrets.token_hex(4)}")
        self.assertIs(signal.getsignal(signal.SIGTERM), signal.default_int_handler)

    def test_its_last_words_are_in_the_error(self) -> None:
        error = self.assertRaises(InfranetesError, programs.run, "sh", "-c", "echo no room; exit 3")
        self.assertIn("exit code 3:\nno room", str(error))
