# SPDX-License-Identifier: Apache-2.0
"""10,000 Services and 1,000 VMs: work for all of them never blocks the reactor for long.

The tests' harness fails a test in which a callback takes more than 50 ms of processor time.
"""

from __future__ import annotations

import gc
from collections.abc import AsyncGenerator, AsyncIterator

from twisted.trial.unittest import TestCase

from infranetes.services.messages import Batches
from infranetes.services.objects import OwnNode
from infranetes.services.pace import Pace
from infranetes.services.sender import RuleSender
from infranetes_common.concurrency import Notifier, deferred
from infranetes_common.reactors import installed
from infranetes_common.wire import vmserver
from tests.infranetes.services.large import large_table, put_service
from tests.support.waiting import until

reactor = installed()
SERVICES, VMS, CHANGES = 10_000, 1000, 10


class VM:
    """An agent that has everything in force at once. :ivar messages: those that it received."""

    def __init__(self) -> None:
        self.messages: list[vmserver.ServiceRulesUpdate] = []

    async def service_rules(
        self, updates: AsyncIterator[vmserver.ServiceRulesUpdate]
    ) -> AsyncGenerator[vmserver.ServiceRulesState, None]:
        yield vmserver.ServiceRulesState()
        async for update in updates:
            self.messages.append(update)
            if not update.more:
                yield vmserver.ServiceRulesState(table=update.table, number=update.number)


class ScaleTests(TestCase):
    timeout = 300

    def setUp(self) -> None:
        gc.collect()
        self.table = large_table(SERVICES)
        self.table.complete = True
        changed, batches, pace = Notifier(), Batches(self.table), Pace(reactor)
        self.changed, self.pace = changed, pace
        self.vms = [VM() for _ in range(VMS)]
        self.senders = [RuleSender(reactor, vm, self.table, changed, batches, pace) for vm in self.vms]

    async def stop(self) -> None:
        for sender in self.senders:
            sender.stop()
        await until(lambda: self.pace._next is None, "the last rest is over")

    def told(self) -> bool:
        return all(each.number == self.table.number for each in self.senders)

    @deferred
    async def test_all_vms_are_sent_the_same_messages_in_small_turns(self) -> None:
        self.addCleanup(self.stop)
        for sender in self.senders:
            reactor.callLater(0, sender.start)
        await until(self.told, "all VMs have all rules", 120)
        made = {id(message) for vm in self.vms for message in vm.messages}
        self.assertEqual(len(made), SERVICES // 500)
        for number in range(CHANGES):
            put_service(self.table, number, shift=1)
            reactor.callLater(0, self.changed.notify)
            await until(self.told, "all VMs have the change", 120)
        made = {id(message) for vm in self.vms for message in vm.messages}
        self.assertEqual(len(made), SERVICES // 500 + CHANGES)


class MoveTests(TestCase):
    @deferred
    async def test_another_zone_is_taken_in_small_steps(self) -> None:
        table = large_table(1000)
        self.assertEqual(len(list(table.move(OwnNode("here", "zone-b")))), 1000 // 50)
        self.assertEqual(list(table.move(OwnNode("here", "zone-b"))), [])
