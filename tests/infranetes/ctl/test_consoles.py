# SPDX-License-Identifier: Apache-2.0
"""Following a VM's console."""

from __future__ import annotations

import argparse
import io
import json
from typing import cast

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from infranetes.ctl.commands import COMMANDS
from infranetes.ctl.consoles import OVERLAP, news
from infranetes.ctl.session import DONE, Session
from infranetes_common.concurrency import start
from infranetes_common.reactors import IReactor
from infranetes_common.wire import control
from infranetes_common.wire.control_rpcs import ControlStub
from txgrpc import Code, GrpcError


class NewsTests(SynchronousTestCase):
    def test_what_comes_after_is_new(self) -> None:
        self.assertEqual(news("", "abc"), "abc")
        self.assertEqual(news("abc", "abcde"), "de")
        self.assertEqual(news("abc", "abc"), "")

    def test_ends_of_one_console_overlap(self) -> None:
        whole = "".join(f"line {number}\n" for number in range(10_000))
        before, after = whole[1000 : OVERLAP * 3], whole[5000 : OVERLAP * 4]
        self.assertEqual(before + news(before, after), whole[1000 : OVERLAP * 4])

    def test_another_console_is_all_new(self) -> None:
        self.assertEqual(news("abc", "xyz"), "xyz")


class _Daemon:
    """A daemon that has this console; with None, it can't be reached."""

    def __init__(self) -> None:
        self.console: control.GetConsoleResponse | None = None

    async def GetConsole(self, request: object, timeout: float) -> control.GetConsoleResponse:
        if self.console is None:
            raise GrpcError(Code.UNAVAILABLE, "nobody listens")
        return self.console


class FollowTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock, self.daemon, self.out = Clock(), _Daemon(), io.StringIO()
        self.patch(__import__("sys"), "stdout", self.out)

    def follow(self, json_wanted: bool = False) -> Deferred[int]:
        options = argparse.Namespace(json=json_wanted, follow=True, pod="web")
        session = Session(cast(IReactor, self.clock), cast(ControlStub, self.daemon), options)
        following = start(COMMANDS["console"].run(session))
        self.addCleanup(lambda: following.addErrback(lambda _: None).cancel())
        return following

    def writes(self, text: str, vm: str = "vm-1", ended_at: int = 0, detail: str = "") -> None:
        self.daemon.console = control.GetConsoleResponse(
            sandbox_id="ab", vm_id=vm, text=text, ended_at=ended_at, detail=detail
        )
        self.clock.advance(1)

    def test_each_part_is_told_once_until_the_vm_is_gone(self) -> None:
        self.writes("Linux ")
        following = self.follow()
        self.writes("Linux version 6")
        self.writes("Linux version 6")
        self.assertNoResult(following)
        self.writes("Linux version 6\nbye", ended_at=5 * 10**9, detail="killed")
        self.assertEqual(self.successResultOf(following), DONE)
        said = "---- VM vm-1 of sandbox ab\nLinux version 6\nbye\n---- the VM is removed: killed\n"
        self.assertEqual(self.out.getvalue(), said)

    def test_another_vm_of_the_pod_is_told_from_its_beginning(self) -> None:
        self.writes("Linux")
        self.follow()
        self.writes("Linux again", vm="vm-2")
        self.assertEqual(self.out.getvalue().count("----"), 2)
        self.assertIn("vm-2 of sandbox ab\nLinux again", self.out.getvalue())

    def test_a_daemon_that_restarts_is_waited_for(self) -> None:
        self.writes("a")
        following = self.follow(json_wanted=True)
        self.daemon.console = None
        self.clock.advance(1)
        self.writes("ab", ended_at=5 * 10**9)
        self.assertEqual(self.successResultOf(following), DONE)
        told = [json.loads(line) for line in self.out.getvalue().splitlines()]
        self.assertEqual([each.get("text") for each in told], ["a", "b", None])
        self.assertEqual(told[-1]["ended_at"], 5.0)

    def test_one_that_is_away_at_first_is_not(self) -> None:
        self.failureResultOf(self.follow(), GrpcError)
