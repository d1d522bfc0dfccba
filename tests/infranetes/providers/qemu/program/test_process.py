# SPDX-License-Identifier: Apache-2.0
"""QEMU's processes, which outlive the daemon."""

from __future__ import annotations

import os
import signal

from twisted.internet.defer import Deferred
from twisted.internet.task import deferLater
from twisted.trial.unittest import TestCase

from infranetes.providers.qemu.program import process
from infranetes.providers.qemu.program.process import WatchedProcess, pids_by_argument
from infranetes_common.reactors import installed
from tests.support.waiting import until

reactor = installed()


class WatchedProcessTests(TestCase):
    """Processes that outlive the daemon."""

    async def start(self, marker: str) -> int:
        with open(os.devnull) as null:
            pid = process.spawn(reactor, ["sleep", marker], {0: null.fileno(), 1: null.fileno()}).pid
        while marker not in pids_by_argument([marker]):
            await deferLater(reactor, 0.01, lambda: None)
        return pid

    async def test_its_end_is_told_once_and_kill_waits_for_it(self) -> None:
        ended: list[None] = []
        pid = await self.start("62.5")
        self.assertEqual(pids_by_argument(["62.5", "other"]), {"62.5": [pid]})
        watched = WatchedProcess(reactor, pid, lambda: ended.append(None))
        self.assertTrue(watched.alive)
        await watched.kill()
        await watched.kill()
        self.assertEqual((watched.alive, watched.gone), (False, True))
        self.assertEqual((ended, pids_by_argument(["62.5"])), ([None], {}))

    async def test_one_that_ends_by_itself_is_told(self) -> None:
        done: Deferred[None] = Deferred()
        pid = await self.start("63.5")
        WatchedProcess(reactor, pid, lambda: done.callback(None))
        os.kill(pid, signal.SIGTERM)
        await done.addTimeout(10.0, reactor)

    async def test_how_it_ended_is_known_of_those_started_here(self) -> None:
        for script, words in (
            ("exit 3", "ended with exit code 3"),
            ("kill -TERM $$", "was killed by SIGTERM"),
            ("kill -KILL $$", "was killed by SIGKILL (by a person, or by the kernel for want of memory"),
        ):
            with open(os.devnull) as null:
                child = process.spawn(reactor, ["sh", "-c", f"read x; {script}"], {0: "w", 1: null.fileno()})  # type: ignore[dict-item]
            done: Deferred[None] = Deferred()
            watched = WatchedProcess(reactor, child.pid, lambda: done.callback(None), child)  # noqa: B023
            child.transport.closeStdin()  # type: ignore[union-attr]
            await done.addTimeout(10.0, reactor)
            self.assertIn(words, watched.end)
        pid = await self.start("69.5")
        stranger = WatchedProcess(reactor, pid, lambda: None)
        await stranger.kill()
        self.assertIn("not known", stranger.end)

    async def test_an_event_that_is_not_its_end_is_no_end(self) -> None:
        pid = await self.start("66.25")
        watched = WatchedProcess(reactor, pid, lambda: self.fail("told"))
        watched.doRead()
        self.assertTrue(watched.alive)
        watched.unwatch()
        await WatchedProcess(reactor, pid, lambda: None).kill()

    async def test_one_that_is_forgotten_goes_on(self) -> None:
        pid = await self.start("64.5")
        watched = WatchedProcess(reactor, pid, lambda: self.fail("told"))
        watched.unwatch()
        watched.unwatch()
        self.assertEqual((watched.alive, watched.gone), (False, False))
        self.assertEqual(pids_by_argument(["64.5"]), {"64.5": [pid]})
        await WatchedProcess(reactor, pid, lambda: None).kill()

    async def test_one_that_is_gone_is_no_process(self) -> None:
        pid = await self.start("65.5")
        await WatchedProcess(reactor, pid, lambda: None).kill()
        await until(lambda: not os.path.exists(f"/proc/{pid}"), "it is reaped")
        self.assertRaises(ProcessLookupError, WatchedProcess, reactor, pid, lambda: None)
