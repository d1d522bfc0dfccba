# SPDX-License-Identifier: Apache-2.0
"""An agent's data is cut to its limits, or refused."""

from __future__ import annotations

import math
from typing import Any, cast

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.logger import capturedLogs
from twisted.trial.unittest import SynchronousTestCase

from infranetes.machines.agent import checks, limits, screen
from infranetes.machines.agent.screen import AgentScreen
from infranetes_common.concurrency import start
from infranetes_common.errors import InfranetesError, InvalidArgument
from infranetes_common.wire import cri, vmserver
from infranetes_common.wire.descriptors import is_repeated
from tests.harness.needs import repetitions
from tests.support.hostile.attacks import MIB
from tests.support.hostile.corpus import messages, responses
from txgrpc import Code, GrpcError
from txgrpc.service import Method
from txgrpc.turns import Turns

METHODS = [Method.from_descriptor(one) for one in vmserver.Agent.methods]
UNKNOWN = b"\xfa\x7f\x03abc"  # a field that no message has
TIDIED = ("Info", "Watch", "StartContainer", "Stats")


def within_limits(test: Any, message: Any) -> None:
    """Check that everything in `message` is within `limits`."""
    for field, value in message.ListFields():
        test.assertTrue(field.full_name)
        name = field.full_name
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            test.assertLessEqual(len(value), limits.COUNTS[name])
            for key, text in value.items():
                test.assertLessEqual(len(key), 128)
                test.assertLessEqual(len(text), 256)
            continue
        if is_repeated(field):
            test.assertLessEqual(len(value), limits.COUNTS[name])
        for one in value if is_repeated(field) else [value]:
            if field.message_type is not None:
                within_limits(test, one)
            elif field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
                test.assertLessEqual(len(one), limits.TEXTS.get(name, limits.TEXT))
            elif field.type == FieldDescriptor.TYPE_DOUBLE:
                test.assertTrue(math.isfinite(one) and 0 <= one <= 100, one)
            else:
                low, high = limits.RANGES.get(name, (0, 2**63 - 1))
                test.assertTrue(low <= one <= high, (name, one))
    test.assertEqual(type(message).FromString(message.SerializeToString()), message)


class ScreenTests(SynchronousTestCase):
    """What is checked before anything is parsed."""

    def setUp(self) -> None:
        self.screen = AgentScreen()

    def refused(self, method: str, payload: bytes) -> str:
        (found,) = (one for one in METHODS if one.name == method)
        error = self.assertRaises(GrpcError, self.screen.check, found, payload)
        return str(error.message)

    def test_each_call_has_its_limit_and_each_repeated_field_its_count(self) -> None:
        for method in METHODS:
            self.screen.check(method, b"")
            most = self.screen.max_response(method)
            self.assertLessEqual(most, MIB if method.name != "ExecSync" else 16 * MIB)
        self.assertEqual(set(limits.MESSAGE_BYTES), {method.name for method in METHODS})

    def test_two_bytes_each_are_counted(self) -> None:
        self.assertIn("StatsResponse.cards", self.refused("Stats", b"\x12\x00" * 500_000))
        self.assertIn("StatsResponse.containers", self.refused("Stats", b"\x1a\x00" * 500_000))
        self.assertIn("image_ids", self.refused("ListImages", b"\x0a\x00" * 500_000))
        self.assertIn("entries", self.refused("ListVolume", b"\x0a\x00" * 500_000))

    def test_what_is_within_is_counted_too(self) -> None:
        for number in (65, 128):  # a length of 256 is \x80\x02
            disks = b"\x3a\x00" * number
            usage = b"\x0a" + bytes([len(disks) & 127 | 128, len(disks) >> 7]) + disks
            self.assertIn("Usage.disks", self.refused("Stats", usage))
        user = cri.LinuxContainerUser(supplemental_groups=[1000] * 10_000)
        state = vmserver.ContainerState(user=cri.ContainerUser(linux=user))
        event = vmserver.WatchEvent(container=state)
        self.assertIn("supplemental_groups", self.refused("Watch", event.SerializeToString()))

    def test_the_same_number_again_and_again(self) -> None:
        again = b"\x08\x01" * 500_000
        self.assertIn("fields", self.refused("Stats", b"\x0a\xc0\x84\x3d" + again))

    def test_what_comes_after_a_number_is_counted_however_long_the_number_is(self) -> None:
        for number in (1, 127, 128, 129, 1 << 20):
            before = vmserver.StatsResponse(machine=vmserver.Usage(time_nanos=number)).SerializeToString()
            self.assertIn("StatsResponse.cards", self.refused("Stats", before + b"\x12\x00" * 500_000))

    def test_parts_count_once_each_however_long_they_are(self) -> None:
        answer = vmserver.StatsResponse()
        for number in range(limits.COUNTS["infranetes.vmserver.v1.StatsResponse.cards"]):
            answer.cards.add(name="x" * 100 + str(number))
        (stats,) = (one for one in METHODS if one.name == "Stats")
        self.screen.check(stats, answer.SerializeToString())
        answer.cards.add()
        self.assertIn("StatsResponse.cards", self.refused("Stats", answer.SerializeToString()))

    def test_what_no_message_can_begin_with(self) -> None:
        for method in METHODS:
            for payload in (
                b"\xff" * 20,
                b"\x80" * MIB,
                b"\xff" * MIB,
                b"\x0a\xff\xff\xff\xff\x0f",
                b"\x0a",
                b"\x08",
                b"\x0d\x00",
            ):
                try:
                    self.screen.check(method, payload)
                except GrpcError:
                    continue
        self.assertIn("groups", self.refused("Stats", b"\x0b\x0c"))
        (stats,) = (one for one in METHODS if one.name == "Stats")
        broken = b"\x0a\x02\x3a\x7f"  # a part that ends in the middle of its own
        self.screen.check(stats, broken + b"\x12\x00" * 500_000)  # the parser refuses all of it
        self.assertRaises(DecodeError, vmserver.StatsResponse.FromString, broken)

    @given(st.sampled_from(METHODS), st.data())
    @settings(max_examples=repetitions(40, 300), deadline=None)
    def test_what_is_let_through_is_of_that_many(self, method: Method, data: st.DataObject) -> None:
        payload = data.draw(responses(method.name))
        try:
            screen.check(method.response_class, payload)
            message = method.response_class.FromString(payload)
        except Exception:
            return
        self._counted(message)

    def _counted(self, message: Any) -> None:
        for field, value in message.ListFields():
            if is_repeated(field):
                most = limits.COUNTS[field.full_name]
                # A number in a packed field may have ten bytes.
                packed = field.type in (FieldDescriptor.TYPE_INT64, FieldDescriptor.TYPE_UINT64)
                self.assertLessEqual(len(value), most * (10 if packed else 1))
            if field.message_type is not None and not field.message_type.GetOptions().map_entry:
                for one in value if is_repeated(field) else [value]:
                    self._counted(one)


class ClampTests(SynchronousTestCase):
    """What is cut after it is parsed."""

    @given(st.sampled_from(TIDIED), st.data())
    @settings(max_examples=repetitions(40, 300), deadline=None)
    def test_whatever_is_said_is_within_limits_afterwards(self, name: str, data: st.DataObject) -> None:
        message = data.draw(messages(vmserver.Agent.methods_by_name[name].output_type))
        within_limits(self, checks.clamped(message))

    def test_what_is_honest_stays_as_it_is(self) -> None:
        state = vmserver.ContainerState(
            id="c1",
            state=cri.CONTAINER_EXITED,
            created_at=1_790_000_000 * 10**9,
            finished_at=1_790_000_001 * 10**9,
            exit_code=-7,
            reason="OOMKilled",
            message="m" * 4096,
            image_id="sha256:" + "1" * 64,
            user=cri.ContainerUser(linux=cri.LinuxContainerUser(uid=2**32 - 2, supplemental_groups=[0, 5])),
            resources=cri.LinuxContainerResources(
                cpu_quota=-1,
                memory_limit_in_bytes=2**63 - 4096,  # no limit, in version 1 of control groups
                memory_swap_limit_in_bytes=-1,
                oom_score_adj=-998,
                unified={"memory.high": "1"},
                hugepage_limits=[cri.HugepageLimit(page_size="2MB", limit=1)],
            ),
        )
        before = vmserver.ContainerState()
        before.CopyFrom(state)
        self.assertEqual(checks.checked_state("c1", state), before)

    def test_entries_of_a_map_are_kept_whole_or_not_at_all(self) -> None:
        unified = {"k" * 128: "v" * 256, "k" * 129: "v", "k": "v" * 257}
        resources = cri.LinuxContainerResources(unified=unified)
        made = checks.checked_state("c1", vmserver.ContainerState(id="c1", resources=resources))
        self.assertEqual(dict(made.resources.unified), {"k" * 128: "v" * 256})

    def test_one_container_is_not_told_of_in_anothers_place(self) -> None:
        other = vmserver.ContainerState(id="c2")
        self.assertRaises(InvalidArgument, checks.checked_state, "c1", other)
        for id in ("", "../x", "x" * 65, "\n"):
            event = vmserver.WatchEvent(container=vmserver.ContainerState(id=id))
            self.assertRaises(InvalidArgument, checks.checked_event, event)
            self.assertRaises(InvalidArgument, checks.checked_event, vmserver.WatchEvent(removed=id))
        late = vmserver.ContainerState(id="c1", started_at=2**63 - 1)
        self.assertEqual(checks.checked_state("c1", late).started_at, limits.LATEST)
        notice = vmserver.WatchEvent(interruption=vmserver.Interruption(reason="spot"))
        self.assertEqual(checks.checked_event(notice).interruption.reason, "spot", "it is about no container")

    def test_figures_are_made_fit_in_turns(self) -> None:
        clock = Clock()
        seconds = clock.seconds

        def later() -> float:
            clock.rightNow += 0.004
            return seconds()

        self.patch(clock, "seconds", later)
        one = vmserver.ContainerUsage(id="c", usage=vmserver.Usage(time_nanos=-5), started_at=-1)
        answer = vmserver.StatsResponse(machine=one.usage, containers=[one] * 20)
        answer.MergeFromString(UNKNOWN)
        made = Deferred.fromCoroutine(checks.checked_stats(answer, Turns(clock)))
        self.assertNoResult(made)
        while clock.getDelayedCalls():
            clock.advance(0)
        within_limits(self, self.successResultOf(made))
        self.assertNotIn(UNKNOWN, answer.SerializeToString())

    def test_more_output_than_was_asked_for_is_cut(self) -> None:
        said = vmserver.ExecSyncResponse(stdout=b"x" * 11, stderr=b"y" * 9, exit_code=3)
        made = checks.checked_output(said, 10)
        self.assertEqual((made.stdout, made.stderr, made.exit_code), (b"x" * 10, b"y" * 9, 3))
        for stdout, stderr in ((b"x" * 10, b"y" * 10), (b"x" * 11, b""), (b"", b"y" * 11)):
            said = vmserver.ExecSyncResponse(stdout=stdout, stderr=stderr)
            said.MergeFromString(UNKNOWN)
            made = checks.checked_output(said, 10)
            self.assertEqual((made.stdout, made.stderr), (stdout[:10], stderr[:10]))
            self.assertNotIn(UNKNOWN, made.SerializeToString())

    def test_a_log_record(self) -> None:
        records = checks.CheckedRecords("c1")
        long = records.checked(vmserver.LogRecord(line=b"x" * 20_000, time_nanos=-1, cursor="c" * 256))
        self.assertEqual((len(long.line), long.time_nanos, len(long.cursor)), (16384, 0, 256))
        self.assertRaises(InfranetesError, records.checked, vmserver.LogRecord(cursor="c" * 257))
        with capturedLogs() as told:
            records.checked(vmserver.LogRecord(line=b"x" * 20_000))
            whole = checks.CheckedRecords("c2")
            for size in (16384, 16385, 20_000):
                whole.checked(vmserver.LogRecord(line=b"x" * size, time_nanos=1))
        self.assertEqual([event["container"] for event in told], ["c2"], "once for each container")
        good = b"2016-10-06T00:07:09.669794202Z stdout F a\n"
        with capturedLogs() as told:
            for text, gap in ((good, False), (good + b"\x1b[2J\n" + good, True), (b"x" * 60_000, True)):
                made = records.checked(vmserver.LogRecord(text=text))
                self.assertEqual((made.text, made.gap), (good * text.count(good), gap))
        self.assertEqual([event["container"] for event in told], ["c1"])

    def test_the_words_of_a_failure_are_cut(self) -> None:
        short, long = GrpcError(Code.INTERNAL, "no"), GrpcError(Code.NOT_FOUND, "n" * 15_000)
        self.assertIs(checks.shortened(short), short)
        self.assertIs(checks.shortened(long).code, Code.NOT_FOUND)
        self.assertLess(len(checks.shortened(long).message), 2100)


class Failing:
    """A call that ends with an error. :ivar cancelled: how often it was cancelled."""

    def __init__(self, error: GrpcError) -> None:
        self.error = error
        self.cancelled = 0

    def __aiter__(self) -> Failing:
        return self

    async def __anext__(self) -> vmserver.LogRecord:
        raise self.error

    def cancel(self) -> None:
        self.cancelled += 1


class StreamTests(SynchronousTestCase):
    """What comes one by one, and its end."""

    def test_the_words_of_its_end_are_cut_as_all_others(self) -> None:
        call = Failing(GrpcError(Code.NOT_FOUND, "x" * 100_000))
        stream: Any = checks.CheckedStream(cast(Any, call), lambda record: record)
        error = self.failureResultOf(start(stream.__anext__()), GrpcError).value
        self.assertEqual((error.code, error.message), (Code.NOT_FOUND, "x" * limits.ERROR_TEXT + "…"))
        self.assertEqual(call.cancelled, 0)

    def test_a_record_without_a_text_of_many_lines_has_its_line(self) -> None:
        record = vmserver.LogRecord(line=b"one", time_nanos=7)
        checked = checks.CheckedRecords("c").checked(
            vmserver.LogRecord.FromString(record.SerializeToString())
        )
        self.assertEqual(checked, record)
        self.assertFalse(checked.HasField("text"))

    def test_a_figure_that_is_no_number_is_zero(self) -> None:
        for said, figure in (
            (math.nan, 0.0),
            (math.inf, 0.0),
            (-math.inf, 0.0),
            (-1.0, 0.0),
            (1e9, 100.0),
            (7.5, 7.5),
        ):
            found = checks.clamped(vmserver.ReleaseMemoryRequest(seconds=said))
            self.assertEqual(found.seconds, figure, said)
