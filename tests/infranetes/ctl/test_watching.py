# SPDX-License-Identifier: Apache-2.0
"""Lists that are printed again when they change."""

from __future__ import annotations

import io
import json
from typing import Any, cast

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from infranetes.ctl.cli import read
from infranetes.ctl.commands import COMMANDS
from infranetes.ctl.screen import Screen
from infranetes.ctl.session import Session
from infranetes.ctl.watching import Watched, changes, new_troubles
from infranetes_common.concurrency import start
from infranetes_common.wire import control
from txgrpc import Code, GrpcError

PODS = Watched("pods", "pod")


class ChangeTests(SynchronousTestCase):
    def test_what_is_new_other_or_gone_is_told_once(self) -> None:
        known, told = changes(PODS, {}, {"pods": [{"id": "a", "state": "launching"}]})
        self.assertEqual(told, [{"change": "added", "pod": {"id": "a", "state": "launching"}}])
        known, told = changes(PODS, known, {"pods": [{"id": "a", "state": "launching"}]})
        self.assertEqual(told, [])
        known, told = changes(PODS, known, {"pods": [{"id": "a", "state": "ready"}, {"id": "b"}]})
        self.assertEqual([each["change"] for each in told], ["changed", "added"])
        known, told = changes(PODS, known, {"pods": [{"id": "b"}]})
        self.assertEqual(told, [{"change": "removed", "pod": {"id": "a", "state": "ready"}}])

    def test_what_a_provider_in_trouble_does_not_list_is_not_gone(self) -> None:
        orphans = Watched("vms", "vm", may_be_partial=True)
        known, _ = changes(orphans, {}, {"vms": [{"id": "a"}, {"id": "b"}], "troubles": []})
        known, told = changes(orphans, known, {"vms": [{"id": "b"}], "troubles": ["aws does not answer"]})
        self.assertEqual(told, [])
        known, told = changes(orphans, known, {"vms": [{"id": "b"}], "troubles": []})
        self.assertEqual(told, [{"change": "removed", "vm": {"id": "a"}}])

    def test_a_trouble_is_told_once_until_it_comes_again(self) -> None:
        trouble = {"change": "trouble", "trouble": "aws does not answer"}
        before, told = new_troubles((), {"troubles": ["aws does not answer"]})
        self.assertEqual(told, [trouble])
        before, told = new_troubles(before, {"troubles": ["aws does not answer"]})
        self.assertEqual(told, [])
        before, told = new_troubles(before, {"troubles": []})
        self.assertEqual(new_troubles(before, {"troubles": ["aws does not answer"]})[1], [trouble])


class _Daemon:
    """A daemon that lists these pods; with None, it can't be reached."""

    def __init__(self) -> None:
        self.pods: list[control.Pod] | None = []

    async def ListPods(self, request: object, timeout: float) -> control.ListPodsResponse:
        if self.pods is None:
            raise GrpcError(Code.UNAVAILABLE, "nobody listens")
        return control.ListPodsResponse(provider="qemu", pods=self.pods)


class FollowTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock, self.daemon, self.out = Clock(), _Daemon(), io.StringIO()
        self.patch(__import__("sys"), "stdout", self.out)

    def watch(self, json_wanted: bool = True) -> Any:
        options = read(["pods", "--watch", *(["--json"] if json_wanted else [])])
        session = Session(cast(Any, self.clock), cast(Any, self.daemon), options)
        watching = start(COMMANDS["pods"].run(session))
        self.addCleanup(lambda: watching.addErrback(lambda _: None).cancel())
        return watching

    def test_each_change_is_a_line_of_json(self) -> None:
        watching = self.watch()
        self.daemon.pods = [control.Pod(id="ab", name="web", state="launching")]
        self.clock.advance(1)
        self.clock.advance(1)
        self.daemon.pods = []
        self.clock.advance(1)
        told = [json.loads(line) for line in self.out.getvalue().splitlines()]
        self.assertEqual([(each["change"], each["pod"]["name"]) for each in told],
                         [("added", "web"), ("removed", "web")])  # fmt: skip
        self.assertNoResult(watching)

    def test_a_daemon_that_restarts_is_waited_for(self) -> None:
        watching = self.watch()
        self.daemon.pods = None
        self.clock.advance(1)
        self.daemon.pods = [control.Pod(id="ab")]
        self.clock.advance(1)
        self.assertIn("added", self.out.getvalue())
        self.assertNoResult(watching)

    def test_one_that_is_away_at_first_is_not(self) -> None:
        self.daemon.pods = None
        self.failureResultOf(self.watch(), GrpcError)

    def test_a_terminal_is_redrawn_and_told_of_trouble(self) -> None:
        self.patch(Session, "on_terminal", True)
        self.watch(json_wanted=False)
        self.daemon.pods = [control.Pod(id="ab", namespace="default", name="web")]
        self.clock.advance(1)
        self.assertEqual(self.out.getvalue().count("\x1b[H"), 2)
        self.assertIn("default     web", self.out.getvalue())
        self.daemon.pods = None
        self.clock.advance(1)
        last = self.out.getvalue().rpartition("\x1b[H")[2]
        self.assertIn("default     web", last)
        self.assertIn("the daemon does not answer: nobody listens", last)


class ScreenTests(SynchronousTestCase):
    def test_what_there_is_no_room_for_is_counted(self) -> None:
        self.patch(__import__("shutil"), "get_terminal_size", lambda: (16, 3))
        terminal = io.StringIO()
        Screen(terminal).show("\n".join(["a" * 20, "b", "c", "d"]))
        shown = terminal.getvalue()
        self.assertIn("a" * 16 + "\x1b[K\n", shown)
        self.assertNotIn("a" * 17, shown)
        self.assertIn("… 2 more lines", shown[-25:])
