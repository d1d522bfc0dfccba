# SPDX-License-Identifier: Apache-2.0
"""What the ledger says of VMs that clouds list late, twice or for too long."""

from __future__ import annotations

from typing import Any

import attrs
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from infranetes.providers.cloud.interface import CloudVM
from infranetes.providers.cloud.vms.ledger import Ledger
from infranetes.providers.interface import InstanceState


class LedgerTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.ledger = Ledger(self.clock.seconds, staleness=60.0)

    def found(self, id: str = "i-1", state: InstanceState = InstanceState.PENDING, **fields: Any) -> CloudVM:
        return CloudVM(id, fields.pop("token", "t"), "s", state, **fields)

    def test_a_state_never_goes_back(self) -> None:
        self.ledger.record(self.found(state=InstanceState.RUNNING, private_address="10.0.0.1"))
        after = self.ledger.record(self.found())
        self.assertEqual((after.state, after.private_address), (InstanceState.RUNNING, "10.0.0.1"))
        self.ledger.record(self.found(state=InstanceState.ENDED))
        self.assertIs(self.ledger.record(self.found(state=InstanceState.RUNNING)).state, InstanceState.ENDED)

    def test_a_new_vm_is_listed_before_the_cloud_lists_it(self) -> None:
        self.ledger.record_launch(self.found())
        self.assertEqual(len(self.ledger.record_list([])), 1)
        self.clock.advance(61.0)
        self.assertEqual(self.ledger.record_list([]), [])

    def test_a_destroyed_vm_is_not_listed_while_the_cloud_lists_it(self) -> None:
        self.ledger.record_launch(self.found())
        self.ledger.record_destroyed("i-1", "t")
        self.assertEqual(self.ledger.record_list([self.found(state=InstanceState.ENDED)]), [])
        self.assertEqual(self.ledger.count_destroyed("t"), 1)

    def test_a_destroyed_vm_that_stays_alive_for_long_is_listed_again(self) -> None:
        self.ledger.record_launch(self.found())
        self.ledger.record_destroyed("i-1", "t")
        alive = self.found(state=InstanceState.RUNNING)
        self.assertEqual(self.ledger.record_list([alive]), [])
        self.clock.advance(61.0)
        self.assertEqual(self.ledger.record_list([self.found(state=InstanceState.ENDED, gone=True)]), [])
        self.assertEqual(self.ledger.record_list([alive]), [alive])

    def test_a_destroyed_vm_is_ending_until_a_list_shows_that_it_is_gone(self) -> None:
        ended = self.found(state=InstanceState.ENDED)
        for gone in ([], [attrs.evolve(ended, gone=True)]):
            self.ledger.record_launch(self.found())
            self.ledger.record_destroyed("i-1", "t")
            self.clock.advance(59.0)
            self.assertEqual(self.ledger.record_list([ended]), [])
            self.assertEqual((self.ledger.ending, self.ledger.lasting), ({"i-1"}, set()))
            self.ledger.record_list(gone)
            self.clock.advance(60.0)
            self.assertEqual(self.ledger.record_list([ended]), [])
            self.assertEqual((self.ledger.ending, self.ledger.lasting), (set(), set()))

    def test_a_destroyed_vm_that_does_not_go_lasts_until_it_is_destroyed_again(self) -> None:
        stopped = self.found(state=InstanceState.ENDED)
        self.ledger.record_destroyed_before({"i-1": "t"})
        self.clock.advance(61.0)
        self.assertEqual(self.ledger.record_list([stopped]), [stopped])
        self.assertEqual(self.ledger.lasting, {"i-1"})
        self.ledger.record_destroyed("i-1", "t")
        self.assertEqual((self.ledger.ending, self.ledger.lasting), ({"i-1"}, set()))

    def test_of_two_vms_of_a_token_the_launched_one_is_kept(self) -> None:
        self.ledger.record(self.found("i-0", created_at=1.0))
        self.ledger.record_launch(self.found("i-1", created_at=2.0))
        self.ledger.record(self.found("i-2", created_at=0.0, token="other"))
        self.assertEqual([one.id for one in self.ledger.duplicates()], ["i-0"])
