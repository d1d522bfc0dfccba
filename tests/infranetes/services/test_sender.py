# SPDX-License-Identifier: Apache-2.0
"""A VM is sent what it lacks, however its calls end."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from ipaddress import ip_network
from typing import TypeAlias, cast

from twisted.internet.defer import Deferred, DeferredQueue
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from infranetes.kubernetes.fields import Name
from infranetes.services import messages, sender
from infranetes.services import table as rule_table
from infranetes.services.messages import Batches, updates
from infranetes.services.objects import OwnNode, Service, endpoint_slice, service
from infranetes.services.pace import Pace
from infranetes.services.sender import RuleSender
from infranetes.services.table import RuleTable
from infranetes_common.concurrency import Notifier, start
from infranetes_common.errors import InfranetesError, NotOffered, Unavailable
from infranetes_common.wire import vmserver
from tests.infranetes.services import objects as written

Arriving: TypeAlias = (
    "DeferredQueue[vmserver.ServiceRulesUpdate | vmserver.ServiceRulesState | InfranetesError]"
)


def a_service(number: int) -> Service:
    found = service(written.service(f"s{number}", (f"10.96.{number // 250}.{number % 250 + 1}",)))
    assert found is not None
    return found


class VM:
    """An agent that accepts what it is sent, and whose connection breaks on request.

    :ivar rules: by key. :ivar messages: those that it received. :ivar deaf: it never confirms updates.
    :ivar refusing: it ends the call at each update.
    :ivar away: it can't be called. :ivar open: whether there is a call.
    """

    def __init__(self) -> None:
        self.rules: dict[bytes, vmserver.ServiceRule] = {}
        self.version = ("", 0)
        self.messages: list[vmserver.ServiceRulesUpdate] = []
        self.calls = 0
        self.deaf = self.refusing = self.away = self.open = False
        self._coming: set[bytes] = set()
        self._arriving: Arriving = DeferredQueue()

    def break_off(self, error: InfranetesError | None = None) -> None:
        """Lose the connection, or fail with `error`."""
        self._arriving.put(error or Unavailable("the connection is lost"))

    def say(self, table: str, number: int) -> None:
        """Send an answer to a question that was not asked."""
        self._arriving.put(vmserver.ServiceRulesState(table=table, number=number))

    async def service_rules(
        self, updates: AsyncIterator[vmserver.ServiceRulesUpdate]
    ) -> AsyncGenerator[vmserver.ServiceRulesState, None]:
        self.calls += 1
        if self.away:
            raise Unavailable("the VM can't be reached")
        self.open = True
        self._arriving = DeferredQueue()
        reading = start(self._read(updates, self._arriving))
        reading.addErrback(lambda _: None)
        try:
            yield vmserver.ServiceRulesState(table=self.version[0], number=self.version[1])
            while True:
                update = await self._arriving.get()
                if isinstance(update, Exception):
                    raise update
                if isinstance(update, vmserver.ServiceRulesState):
                    yield update
                    continue
                self._take(update)
                if not update.more and not self.deaf:
                    yield vmserver.ServiceRulesState(table=self.version[0], number=self.version[1])
        finally:
            self.open = False
            reading.cancel()

    async def _read(self, updates: AsyncIterator[vmserver.ServiceRulesUpdate], into: Arriving) -> None:
        async for update in updates:
            into.put(update)

    def _take(self, update: vmserver.ServiceRulesUpdate) -> None:
        if self.refusing:
            raise Unavailable("nft: Cannot allocate memory")
        self.messages.append(update)
        for rule in update.changed:
            self.rules[rule.key.SerializeToString()] = rule
            self._coming.add(rule.key.SerializeToString())
        for key in update.removed:
            self.rules.pop(key.SerializeToString(), None)
        if not update.more:
            if update.all:
                self.rules = {key: rule for key, rule in self.rules.items() if key in self._coming}
            self._coming.clear()
            self.version = (update.table, update.number)


class _Bug(Exception):
    """Not an error of Infranetes'."""


class UpdateTests(SynchronousTestCase):
    def test_all_rules_come_in_parts(self) -> None:
        self.patch(messages, "PART", 10)
        table = RuleTable(OwnNode("here"))
        self.assertEqual([(each.all, each.more) for each in updates(table, None)], [(True, False)])
        for number in range(25):
            table.put_service(a_service(number))
        found = list(updates(table, None))
        self.assertEqual([len(each.changed) for each in found], [10, 10, 5])
        self.assertEqual(
            [(each.all, each.more) for each in found], [(True, True), (True, True), (True, False)]
        )
        self.assertEqual({(each.table, each.number) for each in found}, {(table.id, 25)})

    def test_a_part_has_only_so_many_source_ranges(self) -> None:
        self.patch(messages, "ADDRESSES_IN_PART", 4)
        table = RuleTable(OwnNode("here"))
        ports = [written.port(number, f"p{number}") for number in range(1, 6)]
        ranges = [f"10.{number}.0.0/16" for number in range(2)]
        item = written.service(ports=ports, loadBalancerSourceRanges=ranges)
        item["status"] = {"loadBalancer": {"ingress": [{"ip": "203.0.113.1"}]}}
        found = service(item)
        assert found is not None
        table.put_service(found)
        for update in updates(table, None):
            self.assertLessEqual(sum(len(rule.source_ranges) for rule in update.changed), 4)

    def test_a_part_has_only_so_many_endpoints_unless_one_rule_has_more(self) -> None:
        self.patch(messages, "ADDRESSES_IN_PART", 4)
        table = RuleTable(OwnNode("here"))
        for number, endpoints in enumerate((2, 2, 1, 5, 3, 1)):
            table.put_service(a_service(number))
            addresses = [written.endpoint(f"10.1.{number}.{each}") for each in range(endpoints)]
            found = endpoint_slice(written.endpoint_slice(*addresses, service=f"s{number}"))
            assert found is not None
            table.put_slice(found)
        sizes = [[len(rule.endpoints) for rule in each.changed] for each in updates(table, None)]
        self.assertEqual(sizes, [[2, 2], [1], [5], [3, 1]])

    def test_a_rule_is_sent_with_all_that_it_says(self) -> None:
        table = RuleTable(OwnNode("here"))
        ports = [written.port(80), written.port(80, "", "UDP"), written.port(81, "s", "SCTP")]
        ranges = ["192.0.2.0/24", "198.51.100.0/24"]
        item = written.service(
            ips=("10.96.0.10",), ports=ports, internalTrafficPolicy="Local", sessionAffinity="ClientIP",
            sessionAffinityConfig={"clientIP": {"timeoutSeconds": 60}}, loadBalancerSourceRanges=ranges,
        )  # fmt: skip
        item["status"] = {"loadBalancer": {"ingress": [{"ip": "203.0.113.1"}]}}
        found, endpoints = service(item), endpoint_slice(
            written.endpoint_slice(written.endpoint("10.1.0.1", node="elsewhere"))
        )  # fmt: skip
        assert found is not None and endpoints is not None
        table.put_service(found)
        table.put_slice(endpoints)
        (update,) = updates(table, None)
        rules = {(rule.key.address[0], rule.key.protocol): rule for rule in update.changed}
        self.assertEqual(sorted(rules), [(10, 6), (10, 17), (10, 132), (203, 6), (203, 17), (203, 132)])
        self.assertEqual(
            {key: (rule.dropped, rule.cluster_ip, rule.affinity_seconds, [*rule.source_ranges])
             for key, rule in rules.items() if key[1] == 6},
            {(10, 6): (True, True, 60, []), (203, 6): (False, False, 60, ranges)},
        )  # fmt: skip
        (target,) = rules[203, 6].endpoints
        self.assertEqual((target.address, target.port), (bytes([10, 1, 0, 1]), 8080))
        self.assertEqual((rules[203, 6].key.address, rules[10, 132].key.port), (bytes([203, 0, 113, 1]), 81))

    def test_what_a_vm_lacks(self) -> None:
        table = RuleTable(OwnNode("here"))
        for number in range(3):
            table.put_service(a_service(number))
        table.remove_service(a_service(1).name)
        (found,) = updates(table, 2)
        self.assertEqual((found.all, len(found.changed), len(found.removed)), (False, 1, 1))
        self.assertFalse(found.HasField("ranges"))

    def test_ranges_come_last_and_when_they_change(self) -> None:
        self.patch(messages, "PART", 1)
        table = RuleTable(OwnNode("here"))
        table.put_service(a_service(1))
        table.put_service(a_service(2))
        table.put_ranges(Name("", "a"), (ip_network("10.96.0.0/12"),))
        first, last = updates(table, None)
        self.assertFalse(first.HasField("ranges"))
        self.assertEqual(last.ranges.ranges, ["10.96.0.0/12"])
        (found,) = updates(table, 2)
        self.assertEqual(found.ranges.ranges, ["10.96.0.0/12"])
        table.put_ranges(Name("", "a"), ())
        (found,) = updates(table, 3)
        self.assertTrue(found.HasField("ranges"))
        self.assertEqual(found.ranges.ranges, [])
        (found,) = updates(table, 4)
        self.assertFalse(found.HasField("ranges"), "it has them")

    def test_one_that_is_sent_all_rules_is_sent_the_ranges_too(self) -> None:
        self.patch(rule_table, "REMEMBERED", 1)
        table = RuleTable(OwnNode("here"))
        table.put_ranges(Name("", "a"), (ip_network("10.96.0.0/12"),))
        for number in range(2):
            table.put_service(a_service(number))
        for number in range(2):
            table.remove_service(a_service(number).name)
        (found,) = updates(table, 3)
        self.assertEqual((found.all, found.ranges.ranges), (True, ["10.96.0.0/12"]))

    def test_vms_that_lack_the_same_share_messages_while_there_is_no_newer_change(self) -> None:
        table = RuleTable(OwnNode("here"))
        table.put_service(a_service(1))
        batches = Batches(table)
        batch = batches.since(None)
        self.assertIs(batches.since(None), batch)
        self.assertIs(batch.message(0), batch.message(0))
        self.assertIsNot(batches.since(0), batch)
        table.put_service(a_service(2))
        self.assertIsNot(batches.since(None), batch)
        self.assertIsNot(batch.message(0), batch.message(0), "it is made again rather than kept")
        self.assertEqual(batch.message(0).number, 1)
        self.assertEqual(batches.since(None).message(0).number, 2)


class SenderTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.changed = Notifier()
        self.vm = VM()
        self.begin()

    def begin(self) -> None:
        """Start a new daemon, whose table is another."""
        self.table = RuleTable(OwnNode("here"))
        self.table.complete = True
        self.sender = RuleSender(
            self.clock, self.vm, self.table, self.changed, Batches(self.table), Pace(self.clock)
        )
        self.sender.start()
        self.addCleanup(self.sender.stop)

    def put(self, *numbers: int) -> None:
        for number in numbers:
            self.table.put_service(a_service(number))
        self.changed.notify()

    def assert_equal(self) -> None:
        """Check that the VM has exactly the table's rules, and has confirmed that."""
        self.assertEqual(len(self.vm.rules), len(self.table.rules))
        self.assertEqual(self.sender.number, self.table.number)
        self.assertEqual(self.vm.version, (self.table.id, self.table.number))

    def test_it_is_sent_all_and_then_changes(self) -> None:
        self.assert_equal()  # the table is empty, and the VM knows that
        self.put(1, 2)
        self.assert_equal()
        self.put(3)
        self.assert_equal()
        self.assertEqual([each.all for each in self.vm.messages], [True, False, False])
        self.assertEqual([len(each.changed) for each in self.vm.messages], [0, 2, 1])

    def test_how_far_the_vm_is_and_how_long_that_took(self) -> None:
        found = self.sender.progress()
        self.assertEqual((found.current, found.behind, found.last_seconds), (True, 0, None))
        self.vm.deaf = True
        self.table.put_service(a_service(1))
        self.table.news.note(self.table.number, self.clock.seconds() - 2.0)
        self.changed.notify()
        self.clock.advance(3.0)
        found = self.sender.progress()
        self.assertEqual((found.current, found.behind, found.heard_seconds), (False, 1, 3.0))
        self.vm.deaf = False
        self.vm.say(self.table.id, self.table.number)
        found = self.sender.progress()
        self.assertEqual((found.current, found.last_seconds, found.p99_seconds, found.count), (True, 5, 5, 1))
        self.table.put_ranges(Name("", "a"), (ip_network("10.96.0.0/12"),))
        self.assertEqual(self.sender.progress().behind, 1)
        self.vm.break_off()
        found = self.sender.progress()
        self.assertEqual((found.current, found.behind), (False, None))
        self.assertIn("connection is lost", found.trouble)

    def test_a_vm_that_has_never_answered_was_never_heard_of(self) -> None:
        self.sender.stop()
        self.vm.away = True
        self.begin()
        found = self.sender.progress()
        self.assertEqual((found.number, found.heard_seconds, found.count), (-1, None, 0))

    def test_a_connection_that_breaks_goes_on_with_what_changed_meanwhile(self) -> None:
        self.put(1, 2)
        self.vm.break_off()
        self.assertEqual(self.sender.number, -1)
        self.put(3)
        self.clock.advance(sender.FIRST_PAUSE)
        self.assert_equal()
        self.assertEqual([each.all for each in self.vm.messages], [True, False, False])
        self.assertEqual(self.vm.calls, 2)

    def test_a_call_that_ends_as_it_is_sent_something_is_sent_nothing_more(self) -> None:
        self.put(1)
        self.vm.refusing = True
        self.put(2)
        self.vm.refusing = False
        self.clock.advance(sender.FIRST_PAUSE)
        self.assert_equal()
        for number in (3, 4):
            self.put(number)
            self.assert_equal()

    def test_an_answer_that_is_lost_is_no_loss(self) -> None:
        self.vm.deaf = True
        self.put(1)
        self.assertLess(self.sender.number, self.table.number)
        self.vm.break_off()
        self.vm.deaf = False
        self.clock.advance(sender.FIRST_PAUSE)
        self.put(2)
        self.assert_equal()
        self.assertEqual(sum(len(each.changed) for each in self.vm.messages), 2)

    def test_another_daemon_sends_all(self) -> None:
        self.put(1, 2)
        self.sender.stop()
        self.begin()
        self.put(1)
        self.assert_equal()

    def test_an_agent_that_does_not_know_is_sent_all(self) -> None:
        self.put(1, 2)
        self.vm.version, self.vm.rules = ("", 0), {}
        self.vm.break_off()
        self.clock.advance(sender.FIRST_PAUSE)
        self.assert_equal()
        self.assertTrue(self.vm.messages[-1].all)

    def test_a_slow_vm_is_sent_each_rule_as_it_is_then(self) -> None:
        self.vm.deaf = True
        self.put(1)
        for _ in range(50):
            self.put(2)
            self.table.remove_service(a_service(2).name)
        self.put(3)
        sent = len(self.vm.messages)
        self.vm.deaf = False
        self.vm.break_off()
        self.clock.advance(sender.FIRST_PAUSE)
        self.assert_equal()
        self.assertEqual(len(self.vm.messages), sent + 1)

    def test_it_is_told_when_the_vm_has_the_rules(self) -> None:
        self.sender.stop()
        self.vm.deaf = True
        self.begin()
        waiting = start(self.sender.when_told())
        self.assertNoResult(waiting)
        self.vm.deaf = False
        self.vm.break_off()
        self.clock.advance(sender.FIRST_PAUSE)
        self.successResultOf(waiting)

    def test_it_pauses_longer_and_longer_while_the_agent_can_not_be_reached(self) -> None:
        self.put(1)
        self.vm.away = True
        self.vm.break_off()
        calls = self.vm.calls
        for _ in range(int(10 * sender.LONGEST_PAUSE / 0.1)):
            self.clock.advance(0.1)
        self.assertLessEqual(self.vm.calls - calls, 6 + 20, "six that grow, and two in the longest pause")
        self.assertGreaterEqual(self.vm.calls - calls, 10)
        self.vm.away = False
        self.clock.advance(sender.LONGEST_PAUSE)
        self.assert_equal()

    def test_vms_that_were_lost_together_are_not_called_together(self) -> None:
        self.put(1)
        self.vm.away = True
        pauses = set()
        for _ in range(5):
            self.sender.stop()
            self.begin()
            self.clock.advance(0)
            (next_call,) = self.clock.getDelayedCalls()
            pauses.add(next_call.getTime() - self.clock.seconds())
        self.assertGreater(len(pauses), 1)
        self.assertTrue(sender.FIRST_PAUSE / 2 <= min(pauses) < max(pauses) <= sender.FIRST_PAUSE, pauses)

    def test_nothing_is_sent_of_a_table_that_is_not_complete(self) -> None:
        self.sender.stop()
        self.begin()
        messages = len(self.vm.messages)
        self.table.complete = False
        self.put(1)
        self.assertEqual(len(self.vm.messages), messages)
        self.table.complete = True
        self.put(2)
        self.assert_equal()

    def test_a_vm_without_a_service_proxy_is_left_alone(self) -> None:
        self.sender.stop()
        self.vm.deaf = True
        self.begin()
        waiting = start(self.sender.when_told())
        self.vm.break_off(NotOffered("no proxy"))
        self.successResultOf(waiting)
        for _ in range(20):
            self.clock.advance(sender.LONGEST_PAUSE)
        self.assertEqual((self.vm.calls, self.sender.trouble), (2, "it has no service proxy"))
        self.successResultOf(start(self.sender.when_told()))

    def test_one_that_is_stopped_ends_its_call_and_whoever_waits(self) -> None:
        self.sender.stop()
        self.vm.deaf = True
        self.begin()
        waiting = start(self.sender.when_told())
        self.assertTrue(self.vm.open)
        for _ in range(2):
            self.sender.stop()
        self.successResultOf(waiting)
        self.successResultOf(start(self.sender.when_told()))
        self.assertFalse(self.vm.open)
        calls, messages = self.vm.calls, len(self.vm.messages)
        self.put(1)
        self.clock.advance(100.0)
        self.assertEqual((self.vm.calls, len(self.vm.messages)), (calls, messages))
        self.assertEqual((self.clock.getDelayedCalls(), self.flushLoggedErrors()), ([], []))

    def test_a_call_that_ended_is_over_when_the_next_one_begins(self) -> None:
        """However it ended: nothing of it goes on, and the VM is not asked all the time."""
        self.put(1)
        for error in (None, Unavailable("away"), None):
            self.vm.break_off(error)
            self.assertFalse(self.vm.open)
            self.assertIn("is lost" if error is None else "away", self.sender.trouble)
            self.clock.advance(sender.FIRST_PAUSE / 2 - 0.01)
            self.assertFalse(self.vm.open)
            self.clock.advance(sender.FIRST_PAUSE / 2 + 0.01)
            self.assertTrue(self.vm.open, "as soon as the first time, since it was there meanwhile")
            self.assertEqual(self.sender.trouble, "")
            self.put(2)
            self.assert_equal()
        self.sender.stop()
        self.assertEqual(self.changed.waiters, 0)

    def test_a_vm_that_knows_that_there_are_no_rules_was_there_meanwhile_too(self) -> None:
        for _ in range(4):
            self.vm.break_off()
            self.assertFalse(self.vm.open)
            self.clock.advance(sender.FIRST_PAUSE)
            self.assertTrue(self.vm.open)

    def test_a_bug_of_its_own_is_logged_and_an_end_is_not(self) -> None:
        self.vm.break_off(cast(InfranetesError, _Bug("a bug")))
        self.assertEqual(len(self.flushLoggedErrors(_Bug)), 1)

    def test_an_answer_to_what_was_not_asked_ends_the_call(self) -> None:
        for place, (table, older) in enumerate(((self.table.id, 0), (self.table.id, 1), ("other", 0))):
            self.put(place)
            self.vm.say(table, self.table.number - older)
            self.assertIn("does not match the rules", self.sender.trouble)
            self.assertEqual((self.sender.number, self.vm.open), (-1, False))
            self.clock.advance(sender.LONGEST_PAUSE)
            self.assert_equal()
        self.vm.deaf = True
        for place, (table, older) in enumerate(((self.table.id, 1), ("other", 0)), 9):
            self.put(place)
            self.vm.say(table, self.table.number - older)
            self.assertIn("does not match the rules", self.sender.trouble)
            self.clock.advance(sender.LONGEST_PAUSE)

    def test_each_message_waits_for_its_turn(self) -> None:
        self.patch(messages, "PART", 1)
        turns: list[Deferred[None]] = []

        class Slow(Pace):
            def turn(self) -> Deferred[None]:
                turns.append(Deferred())
                return turns[-1]

        self.sender.stop()
        self.sender = RuleSender(
            self.clock, self.vm, self.table, self.changed, Batches(self.table), Slow(self.clock)
        )
        self.sender.start()
        self.addCleanup(self.sender.stop)
        self.put(1, 2)
        before = len(self.vm.messages)
        for number in range(2):
            self.assertEqual((len(turns), len(self.vm.messages)), (number + 1, before + number))
            turns[number].callback(None)
        self.assert_equal()

    def test_an_agent_that_answers_anything_is_not_sent_all_again_and_again(self) -> None:
        self.put(1)
        for _ in range(20):
            self.vm.say("other", 0)
        self.assertEqual(self.vm.calls, 1)
        self.assertIn("does not match the rules", self.sender.trouble)
        self.assertLess(len(self.vm.messages), 4)
