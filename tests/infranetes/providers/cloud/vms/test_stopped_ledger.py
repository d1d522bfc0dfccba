# SPDX-License-Identifier: Apache-2.0
"""What the ledger makes of VMs that are stopped and started, and the files that tell which were."""

from __future__ import annotations

from pathlib import Path

import attrs
from twisted.trial.unittest import SynchronousTestCase

from infranetes.providers.cloud.interface import CloudVM
from infranetes.providers.cloud.vms.ledger import Ledger
from infranetes.providers.cloud.vms.stopping import StoppedFiles
from infranetes.providers.interface import InstanceState
from infranetes_common.errors import FailedPrecondition, Unavailable

TOKEN = "a" * 32
STALE = 30.0
RUNNING = CloudVM("i-1", TOKEN, "b" * 32, InstanceState.RUNNING, private_address="10.0.0.1")
HALTED = attrs.evolve(RUNNING, state=InstanceState.ENDED, halted=True, detail="somebody has stopped it")
HALTING = attrs.evolve(RUNNING, state=InstanceState.ENDED, halting=True)
GONE = attrs.evolve(RUNNING, state=InstanceState.ENDED, gone=True)


class StoppedLedgerTests(SynchronousTestCase):
    """A VM that the cloud shows as stopped."""

    def setUp(self) -> None:
        self.now = 1000.0
        self.ledger = Ledger(lambda: self.now, STALE)
        self.ledger.record(RUNNING)

    def stop(self) -> None:
        self.ledger.stopped.add(TOKEN)
        self.ledger.record(HALTED)

    def assert_is(self, state: InstanceState, said: CloudVM) -> CloudVM:
        known = self.ledger.record(said)
        self.assertIs(known.state, state)
        return known

    def test_it_has_ended_if_we_have_not_stopped_it(self) -> None:
        self.assertEqual(self.assert_is(InstanceState.ENDED, HALTED).detail, HALTED.detail)
        self.assertEqual(self.ledger.live(), [])

    def test_it_is_stopped_if_we_have_and_lives(self) -> None:
        self.ledger.stopped.add(TOKEN)
        self.assert_is(InstanceState.RUNNING, HALTING)
        self.assertEqual(self.assert_is(InstanceState.STOPPED, HALTED).detail, "")
        self.assertEqual([entry.vm.id for entry in self.ledger.live()], ["i-1"])

    def test_seen_first_it_is_no_end(self) -> None:
        later = Ledger(lambda: self.now, STALE)
        later.stopped.add(TOKEN)
        self.assertIs(later.record(HALTED).state, InstanceState.STOPPED)
        self.assertFalse(later.entries["i-1"].end_reported)

    def test_what_is_gone_has_ended_though_we_had_stopped_it(self) -> None:
        self.stop()
        self.assert_is(InstanceState.ENDED, GONE)

    def test_old_answers_do_not_make_it_run_and_new_ones_do(self) -> None:
        self.stop()
        self.now += STALE - 1
        self.assert_is(InstanceState.STOPPED, RUNNING)
        self.assertTrue(self.ledger.has_just_stopped("i-1"))
        self.now += 2
        self.assertFalse(self.ledger.has_just_stopped("i-1"))
        self.assert_is(InstanceState.RUNNING, RUNNING)

    def test_once_started_it_is_pending_also_by_old_answers_and_has_no_address_before_it_is_told(
        self,
    ) -> None:
        self.stop()
        self.ledger.stopped.discard(TOKEN)
        started = self.ledger.record_start("i-1")
        self.assertEqual((started.state, started.private_address), (InstanceState.PENDING, ""))
        self.now += STALE - 1
        self.assert_is(InstanceState.PENDING, HALTED)
        again = attrs.evolve(RUNNING, private_address="10.0.0.2")
        self.assertEqual(self.assert_is(InstanceState.RUNNING, again).private_address, "10.0.0.2")

    def test_one_that_falls_back_to_stopped_has_ended(self) -> None:
        self.stop()
        self.ledger.stopped.discard(TOKEN)
        self.ledger.record_start("i-1")
        self.now += STALE + 1
        self.assertEqual(self.assert_is(InstanceState.ENDED, HALTED).detail, HALTED.detail)


class FileTests(SynchronousTestCase):
    """Which VMs were stopped, for the next daemon."""

    def test_they_are_found_again_and_nothing_else_is(self) -> None:
        directory = Path(self.mktemp()) / "aws" / "stopped"
        files = StoppedFiles(directory)
        self.assertEqual(files._thd_load(), set())
        for _ in range(2):
            files._thd_add(TOKEN)
        files._thd_add("c" * 32)
        (directory / ".half-written").touch()
        self.assertEqual(StoppedFiles(directory)._thd_load(), {TOKEN, "c" * 32})
        for _ in range(2):
            files._thd_remove(TOKEN)
        self.assertEqual(StoppedFiles(directory)._thd_load(), {"c" * 32})

    def test_a_directory_that_can_not_be_used_is_named(self) -> None:
        file = Path(self.mktemp())
        file.touch()
        self.assertIn(
            str(file), str(self.assertRaises(FailedPrecondition, StoppedFiles(file / "x")._thd_load))
        )
        self.assertIn(TOKEN, str(self.assertRaises(Unavailable, StoppedFiles(file / "x")._thd_add, TOKEN)))
