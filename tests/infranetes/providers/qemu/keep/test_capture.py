# SPDX-License-Identifier: Apache-2.0
"""The instant at which a VM is kept, over a QEMU that a test plays: whatever happens, the VM goes on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from infranetes.providers.qemu.keep.capture import Capture, Pause
from infranetes.providers.qemu.program.qmp import QmpConnection, QmpError, QmpEvent
from infranetes_common.concurrency import start
from infranetes_common.errors import Unavailable

Answer = Mapping[str, object]


class Qemu:
    """A VM's monitor.

    :ivar status: of the migration. :ivar then: what it is after so many looks at it, by what it is before.
    :ivar runs: whether the VM executes. :ivar ram: what is told of the memory that was written.
    :ivar calls: commands other than looks, in order. :ivar arguments: what each was given last.
    :ivar refused: commands that fail.
    """

    def __init__(self) -> None:
        self.status = ""
        self.then: dict[str, tuple[int, str]] = {}
        self.runs = True
        self.state = "paused"
        self.ram: dict[str, object] = {}
        self.error = ""
        self.calls: list[str] = []
        self.arguments: dict[str, Mapping[str, object]] = {}
        self.refused: set[str] = set()
        self.looks = 0

    async def pass_file(self, name: str, descriptor: int) -> None:
        self.calls.append(f"pass {name} {descriptor}")

    async def execute(self, command: str, **arguments: object) -> Answer:
        if command == "query-migrate":
            return self._look()
        if command == "query-status":
            return {"running": self.runs, "status": "running" if self.runs else self.state}
        self.calls.append(command)
        self.arguments[command] = arguments
        if command in self.refused:
            raise QmpError("GenericError", f"{command} is refused")
        if command == "stop":
            self.runs = False
        elif command == "cont":
            self.runs = True
        elif command == "migrate":
            self.become("setup")
        elif command == "migrate-continue":
            self.become("device")
        elif command == "migrate_cancel":
            self.become("cancelled")
        return {}

    def become(self, status: str) -> None:
        self.status, self.looks = status, 0
        if status in ("pre-switchover", "completed"):
            self.runs = False

    def _look(self) -> Answer:
        self.looks += 1
        after, status = self.then.get(self.status, (0, ""))
        if after and self.looks > after:
            self.become(status)
        told: dict[str, object] = {"status": self.status, "ram": self.ram, "error-desc": self.error}
        return {name: value for name, value in told.items() if value}


class CaptureCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.qemu = Qemu()
        self.qemu.then = {
            "setup": (1, "active"), "active": (2, "pre-switchover"), "device": (2, "completed")
        }  # fmt: skip
        self.capture = Capture(self.clock, cast(QmpConnection, self.qemu))

    async def insert(self) -> None:
        self.qemu.calls.append("insert")

    def taking(self, emulated: bool = False) -> Deferred[None]:
        return start(self.capture.take(7, self.insert, emulated))

    def wait(self, seconds: float) -> None:
        for _ in range(round(seconds * 100)):
            self.clock.advance(0.01)

    SET_UP = ("pass keep 7", "migrate-set-capabilities", "migrate-set-parameters")


class TakeTests(CaptureCase):
    def test_a_vm_executes_until_qemu_stops_it_and_the_layer_is_inserted_at_that_instant(self) -> None:
        taking = self.taking()
        self.wait(0.1)
        self.successResultOf(taking)
        self.assertEqual(self.qemu.calls, [*self.SET_UP, "migrate", "insert", "migrate-continue"])

    def test_all_of_the_memory_is_written_to_the_descriptor_as_fast_as_can_be(self) -> None:
        self.taking()
        arguments = self.qemu.arguments
        self.assertEqual(arguments["migrate"], {"uri": "fd:keep"})
        said = cast(list[Answer], arguments["migrate-set-capabilities"]["capabilities"])
        self.assertEqual(
            {str(each["capability"]): each["state"] for each in said},
            {"pause-before-switchover": True, "events": True, "x-ignore-shared": False},
        )
        self.assertEqual(arguments["migrate-set-parameters"]["downtime_limit"], 100, "milliseconds")
        self.assertGreater(int(str(arguments["migrate-set-parameters"]["max_bandwidth"])), 1 << 35)

    def test_an_emulated_one_is_stopped_before(self) -> None:
        taking = self.taking(emulated=True)
        self.wait(0.1)
        self.successResultOf(taking)
        self.assertEqual(self.qemu.calls, [*self.SET_UP, "stop", "migrate", "insert", "migrate-continue"])

    def test_one_that_changes_its_memory_as_fast_as_it_is_written_is_stopped_once(self) -> None:
        total = 1000
        for ram, stops in (
            ({"transferred": 1501, "total": total}, 1),
            ({"transferred": 1500, "total": total}, 0),
            ({"dirty-sync-count": 4}, 1),
            ({"dirty-sync-count": 3}, 0),
            ({"transferred": 5, "total": 0}, 0),
            ({"transferred": "much"}, 0),
        ):
            self.setUp()
            self.qemu.ram = dict(ram)
            self.qemu.then["active"] = (9, "pre-switchover")
            taking = self.taking()
            self.wait(0.3)
            self.successResultOf(taking)
            self.assertEqual(self.qemu.calls.count("stop"), stops, ram)

    def test_one_that_takes_too_long_is_stopped(self) -> None:
        del self.qemu.then["active"]
        taking = self.taking()
        self.wait(29.9)
        self.assertNotIn("stop", self.qemu.calls)
        self.wait(0.3)
        self.assertEqual(self.qemu.calls.count("stop"), 1)
        self.qemu.become("pre-switchover")
        self.wait(0.1)
        self.successResultOf(taking)

    def test_the_devices_are_waited_for_and_nothing_is_stopped_for_them(self) -> None:
        self.qemu.then["device"] = (4000, "completed")
        taking = self.taking()
        self.wait(35)
        self.assertNoResult(taking)
        self.wait(10)
        self.successResultOf(taking)
        self.assertNotIn("stop", self.qemu.calls)

    def test_a_migration_that_fails_says_why(self) -> None:
        for failing in ("active", "device"):
            self.setUp()
            self.qemu.then[failing] = (1, "failed")
            self.qemu.error = "the pipe is closed" if failing == "active" else ""
            taking = self.taking()
            self.wait(0.2)
            said = str(self.failureResultOf(taking, Unavailable).value)
            self.assertIn("the pipe is closed" if failing == "active" else "failed", said)
            self.assertEqual("insert" in self.qemu.calls, failing == "device")


class GoOnTests(CaptureCase):
    """Whatever has become of the migration, the VM executes afterwards, and QEMU has no descriptor of it."""

    def go_on(self, status: str, runs: bool) -> list[str]:
        self.qemu.become(status)
        self.qemu.runs = runs
        going = start(self.capture.let_go_on())
        self.wait(1.0)
        self.successResultOf(going)
        self.assertTrue(self.qemu.runs)
        return self.qemu.calls

    def test_after_one_that_has_ended_it_is_continued_if_it_is_stopped(self) -> None:
        for status in ("", "completed", "failed", "cancelled"):
            for runs in (False, True):
                self.setUp()
                expected = ["closefd"] if runs else ["cont", "closefd"]
                self.assertEqual(self.go_on(status, runs), expected, status)

    def test_one_that_goes_on_is_cancelled(self) -> None:
        for status in ("setup", "active"):
            self.setUp()
            self.qemu.then = {}
            self.assertEqual(self.go_on(status, runs=True), ["migrate_cancel", "closefd"])

    def test_one_whose_devices_are_written_ends_by_itself(self) -> None:
        self.qemu.then = {"device": (20, "completed")}
        self.assertEqual(self.go_on("device", runs=False), ["cont", "closefd"])

    def test_one_that_is_stopped_may_have_been_told_to_go_on_just_before(self) -> None:
        self.qemu.then = {"pre-switchover": (5, "device"), "device": (2, "completed")}
        self.assertEqual(self.go_on("pre-switchover", runs=False), ["cont", "closefd"])

    def test_and_is_cancelled_if_it_was_not(self) -> None:
        self.qemu.then = {}
        self.assertEqual(self.go_on("pre-switchover", runs=False), ["migrate_cancel", "cont", "closefd"])
        self.assertGreater(self.clock.seconds(), 0.09)

    def test_a_vm_that_is_finishing_is_waited_for(self) -> None:
        self.qemu.become("completed")
        self.qemu.state = "finish-migrate"
        going = start(self.capture.let_go_on())
        self.wait(0.1)
        self.assertNoResult(going)
        self.assertEqual(self.qemu.calls, [])
        self.qemu.state = "paused"
        self.wait(0.1)
        self.successResultOf(going)
        self.assertEqual(self.qemu.calls, ["cont", "closefd"])

    def test_without_a_descriptor_there_is_none_to_close(self) -> None:
        self.qemu.refused = {"closefd"}
        self.go_on("completed", runs=False)

    def test_one_that_does_not_end_is_told(self) -> None:
        self.qemu.then = {}
        self.qemu.become("device")
        going = start(self.capture.let_go_on())
        self.wait(9.9)
        self.assertNoResult(going)
        self.wait(0.3)
        self.assertIn("does not end", str(self.failureResultOf(going, Unavailable).value))


class PauseTests(SynchronousTestCase):
    def test_it_is_from_the_first_stop_to_the_resume_after_it(self) -> None:
        clock = Clock()
        pause = Pause(clock)
        for name in ("RESUME", "STOP", "STOP", "OTHER", "RESUME"):
            clock.advance(1)
            pause.heard(QmpEvent(name, {}))
            self.assertEqual(pause.seconds, 3.0 if name == "RESUME" and pause.began is not None else 0.0)
        self.assertEqual((pause.began, pause.ended), (2.0, 5.0))
