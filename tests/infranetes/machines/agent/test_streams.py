# SPDX-License-Identifier: Apache-2.0
"""What the calls with streams ask the agent, and what becomes of what they bring."""

from __future__ import annotations

from collections.abc import AsyncIterator
from ipaddress import ip_network
from typing import Any, cast

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock

from infranetes.machines.agent import client, layers, limits, volumes
from infranetes.machines.agent.calls import CHUNK_BYTES, closing
from infranetes_common.concurrency import start
from infranetes_common.errors import (
    InfranetesError,
    InvalidArgument,
    NotOffered,
    ResourceExhausted,
    Unavailable,
)
from infranetes_common.filesync.manifest import FILE, Entry, Removed, Unread
from infranetes_common.filesync.wire import change_to_wire, to_wire
from infranetes_common.pod_firewall import Allowed, PodFirewall
from infranetes_common.wire import vmserver
from tests.infranetes.machines.agent.request_case import BOUNDS, FakeCall, RequestCase, collected, iterated
from txgrpc import Code, GrpcError
from txgrpc.turns import Turns


class StreamTests(RequestCase):
    """Calls that stream their requests or answers."""

    def test_whatever_runs_on_has_no_time_limit_and_a_bound_on_what_is_received_ahead(self) -> None:
        for rpc, call in (
            ("Exec", self.client.exec),
            ("Attach", self.client.attach),
            ("PortForward", self.client.port_forward),
            ("Shell", self.client.shell),
        ):
            opened = self.channel.answers[rpc] = FakeCall([])
            self.channel.calls.clear()
            self.assertIs(call(), opened)
            self.assertEqual(self.channel.calls, [(rpc, None, None)])
            self.assertEqual(opened.ahead, limits.STREAM_AHEAD_BYTES)
        self.channel.answers["Watch"] = FakeCall([vmserver.WatchEvent(removed="c1")])
        self.channel.calls.clear()
        events = self.client.watch()
        self.assertEqual(self.channel.calls, [("Watch", vmserver.WatchRequest(), None)])
        (event,) = self.successResultOf(start(collected(events)))
        self.assertEqual(event, vmserver.WatchEvent(removed="c1"))

    def test_an_event_of_what_can_be_no_container_ends_the_stream(self) -> None:
        watched = self.channel.answers["Watch"] = FakeCall([vmserver.WatchEvent(removed="../x")])
        error: Any = self.failureResultOf(start(collected(self.client.watch())), GrpcError).value
        self.assertIs(error.code, Code.INVALID_ARGUMENT)
        self.assertTrue(watched.cancelled)
        watched.cancelled = False
        self.client.watch().cancel()
        self.assertTrue(watched.cancelled)

    def test_a_log(self) -> None:
        record = vmserver.LogRecord(line=b"a", cursor="1")
        for follow in (False, True):
            read = self.channel.answers["ReadLog"] = FakeCall([record], GrpcError(Code.UNAVAILABLE, "lost"))
            request = vmserver.ReadLogRequest(id="c1", cursor="0", follow=follow, text=True)
            self.channel.calls.clear()
            reading = self.client.read_log("c1", "0", follow)
            self.assertEqual(self.successResultOf(start(anext(reading))), record)  # type: ignore[arg-type]
            self.failureResultOf(start(anext(reading)), Unavailable)  # type: ignore[arg-type]
            self.assertEqual(self.channel.calls, [("ReadLog", request, None)])
            self.assertTrue(read.cancelled)

    def test_an_image_and_a_layer_go_in_pieces_of_every_byte(self) -> None:
        data = [b"a" * CHUNK_BYTES + b"b", b"c"]
        pieces = [b"a" * CHUNK_BYTES, b"b", b"c"]
        header = vmserver.LoadImageRequest(header=vmserver.LoadImageHeader(image_id="i"))
        loaded = [header, *(vmserver.LoadImageRequest(data=each) for each in pieces)]
        self.asked(self.client.load_image("i", iterated(*data)), "LoadImage", loaded, client.LOAD_SECONDS)
        layer = vmserver.PutLayerHeader(diff_id="a", size=9)
        put = [vmserver.PutLayerRequest(header=layer), *(vmserver.PutLayerRequest(data=x) for x in pieces)]
        self.asked(self.client.put_layer(layer, iterated(*data)), "PutLayer", put, layers.PUT_SECONDS)

    def test_data_that_can_not_be_closed_need_not_be(self) -> None:
        async def used() -> str:
            async with closing(cast(Any, iter(()))):
                return "used"

        self.assertEqual(self.successResultOf(start(used())), "used")

    def test_a_volume_is_put_with_all_that_it_is_to_be(self) -> None:
        change = Removed(b"old")
        header = vmserver.VolumeHeader(
            id="v1",
            file=True,
            in_memory=True,
            bounds=vmserver.VolumeBounds(entries=3, bytes=1000),
            size_limit=5,
            huge_page_size=6,
        )
        put = [
            vmserver.PutVolumeRequest(header=header),
            vmserver.PutVolumeRequest(change=change_to_wire(change)),
        ]
        call = self.client.put_volume(
            "v1", file=True, in_memory=True, bounds=BOUNDS, changes=iterated(change),
            size_limit=5, huge_page_size=6,
        )  # fmt: skip
        self.asked(call, "PutVolume", put, volumes.VOLUME_SECONDS)

    def files(self, *names: str, size: int = 1) -> list[Entry]:
        return [Entry(name.encode(), FILE, 0o644, 0, 0, size, 1) for name in names]

    def listed(self, *pages: list[Entry]) -> FakeCall:
        messages = [vmserver.ListVolumeResponse(entries=map(to_wire, page)) for page in pages]
        self.channel.answers["ListVolume"] = call = FakeCall([*messages])
        return call

    def test_a_list_may_be_as_large_as_its_bounds_and_no_larger(self) -> None:
        request = vmserver.ListVolumeRequest(id="v1", bounds=vmserver.VolumeBounds(entries=3, bytes=1000))
        four = self.files("a", "b", "c", "d", size=250)  # the top itself does not count
        self.listed(four[:2], four[2:])
        found = self.asked(
            self.client.list_volume("v1", BOUNDS), "ListVolume", request, volumes.VOLUME_SECONDS
        )
        self.assertEqual(found, {each.path: each for each in four})
        for pages in ([*four, *self.files("e", size=0)], self.files("a", size=1001)):
            call = self.listed(pages)
            self.failureResultOf(start(self.client.list_volume("v1", BOUNDS)), ResourceExhausted)
            self.assertTrue(call.cancelled)

    def read(self, *changes: Any, wanted: list[Entry]) -> Any:
        self.channel.answers["ReadVolume"] = FakeCall([change_to_wire(each) for each in changes])
        self.channel.calls.clear()
        return start(collected(self.client.read_volume("v1", wanted)))

    def test_files_are_read_in_the_order_in_which_they_were_asked_for(self) -> None:
        first, second = wanted = self.files("a", "b")
        changes = [first, b"x", second, Unread(b"b")]
        self.assertEqual(self.successResultOf(self.read(*changes, wanted=wanted)), changes)
        request = vmserver.ReadVolumeRequest(id="v1", entries=map(to_wire, wanted))
        self.assertEqual(self.channel.calls, [("ReadVolume", request, volumes.VOLUME_SECONDS)])
        for refused in (
            [second, first],
            [first, first],
            [first, second, *self.files("c")],
            [Unread(b"c")],
            [first, Unread(b"a"), Unread(b"a")],
            [first, b""],
        ):
            self.failureResultOf(self.read(*refused, wanted=wanted), InvalidArgument)

    def test_what_takes_long_to_make_or_to_read_gives_other_work_its_turns(self) -> None:
        clock = Clock()
        self.channel.turns = Turns(clock)
        seconds = clock.seconds

        def later() -> float:
            clock.rightNow += 0.02
            return seconds()

        self.patch(clock, "seconds", later)
        files = self.files(*map(str, range(5000)))
        self.channel.answers["ReadVolume"] = FakeCall([])
        network = ip_network("10.0.0.0/8")
        for call in (
            collected(self.client.read_volume("v1", files)),
            self.client.set_firewall(PodFirewall((Allowed((network,)),) * 3)),
            self.client.set_firewall(PodFirewall(None, (Allowed((network,)),) * 3)),
            self.client.exec_sync("c1", ["ls"], 0, 60.0, 9),
        ):
            clock.rightNow += 1
            self.channel.turns.rest()
            made: Any = start(call)
            self.assertNoResult(made)
            while clock.getDelayedCalls():
                clock.advance(0)
            self.successResultOf(made)

    def test_changes_of_volumes_are_told_as_long_as_somebody_listens(self) -> None:
        request = vmserver.WatchVolumesRequest(
            ids=["v1"], bounds=vmserver.VolumeBounds(entries=3, bytes=1000)
        )
        events = [vmserver.WatchVolumesResponse(id="v1")] * 2
        watched = self.channel.answers["WatchVolumes"] = FakeCall([*events])
        call = collected(self.client.watch_volumes(["v1"], BOUNDS))
        self.assertEqual(self.asked(call, "WatchVolumes", request, None), ["v1", "v1"])
        self.assertTrue(watched.cancelled)

    def test_rules_of_services_are_sent_while_their_states_are_read(self) -> None:
        states = [vmserver.ServiceRulesState(number=1), vmserver.ServiceRulesState(number=2)]
        rules = self.channel.answers["ServiceRules"] = FakeCall([*states])
        update = vmserver.ServiceRulesUpdate(number=2)
        call = collected(self.client.service_rules(iterated(update)))
        self.assertEqual(self.asked(call, "ServiceRules", None, None), states)
        self.assertEqual((rules.sent, rules.cancelled), ([update], True))

    def test_rules_that_can_not_be_sent_end_their_call(self) -> None:
        async def broken() -> AsyncIterator[Any]:
            raise Unavailable("the view of the cluster is lost")
            yield

        rules = self.channel.answers["ServiceRules"] = FakeCall([vmserver.ServiceRulesState()])
        states = self.client.service_rules(broken())
        self.successResultOf(start(anext(states)))  # type: ignore[arg-type]
        self.assertTrue(rules.cancelled)

    def test_nobody_sends_rules_any_more_once_their_states_are_no_longer_read(self) -> None:
        ended: list[bool] = []

        async def updates() -> AsyncIterator[Any]:
            try:
                await Deferred()
                yield
            finally:
                ended.append(True)

        self.channel.answers["ServiceRules"] = FakeCall([vmserver.ServiceRulesState()])
        states = self.client.service_rules(updates())
        self.successResultOf(start(anext(states)))  # type: ignore[arg-type]
        self.successResultOf(start(states.aclose()))  # type: ignore[arg-type]
        self.assertEqual(ended, [True])


class ShellTests(RequestCase):
    """The output of a shell of the VM."""

    def output(self, *messages: vmserver.SessionOutput, error: GrpcError | None = None) -> Any:
        self.call = FakeCall([*messages], error)
        return start(collected(self.client.shell_output(cast(Any, self.call))))

    def end(self, code: int) -> vmserver.SessionOutput:
        return vmserver.SessionOutput(end=vmserver.SessionEnd(exit_code=code))

    def test_it_ends_with_an_exit_code_of_a_byte(self) -> None:
        said = vmserver.SessionOutput(stdout=b"x")
        for code, told in ((0, 0), (255, 255), (256, 255), (-1, 255)):
            ended = self.output(said, self.end(code), said)
            self.assertEqual(self.successResultOf(ended), [said, self.end(told)])
            self.assertTrue(self.call.cancelled)

    def test_without_one_it_has_failed(self) -> None:
        self.failureResultOf(self.output(), InfranetesError)

    def test_an_agent_may_have_no_shell(self) -> None:
        old = self.output(error=GrpcError(Code.UNIMPLEMENTED, "unknown method"))
        self.failureResultOf(old, NotOffered)
        self.failureResultOf(self.output(error=GrpcError(Code.UNAVAILABLE, "lost")), Unavailable)
