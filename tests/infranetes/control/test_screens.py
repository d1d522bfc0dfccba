# SPDX-License-Identifier: Apache-2.0
"""What the daemon relays between infranetes-ctl and a VM's screen, both over real sockets."""

from __future__ import annotations

import os
from typing import Any, cast

from twisted.internet.defer import Deferred
from twisted.internet.endpoints import UNIXClientEndpoint
from twisted.internet.task import deferLater

from infranetes.control.screens import AHEAD_BYTES, MAX_VIEWERS
from infranetes.control.visits import START_SECONDS
from infranetes.pods.vm.screens import CONNECT_SECONDS, MOST_BYTES, PICTURE_SECONDS
from infranetes.providers.interface import IPodProvider
from infranetes_common.concurrency import start
from infranetes_common.wire import control
from tests.infranetes.control.screens import GREETING, ScreenCase, png
from tests.infranetes.control.visit_case import reactor
from tests.infranetes.pods.fake_provider import FakeProvider
from tests.infranetes.pods.fakes import pod
from tests.support.waiting import until
from txgrpc import Code

Request = control.ConnectScreenRequest


class Case(ScreenCase):
    def shot(self, name: str = "web") -> Any:
        return self.stub.Screenshot(control.ScreenshotRequest(pod=name), timeout=50.0)

    async def connect(self, name: str = "web", only_check: bool = False) -> Any:
        call = self.stub.ConnectScreen(timeout=50.0)
        self.addCleanup(call.cancel)
        await call.send(Request(start=control.ConnectScreenStart(pod=name, only_check=only_check)))
        return call

    async def greeted(self) -> Any:
        """Return a call whose screen has greeted."""
        call = await self.connect()
        self.assertTrue((await anext(aiter(call))).HasField("begun"))
        self.assertEqual((await anext(aiter(call))).data, GREETING)
        return call


class ScreenshotTests(Case):
    async def test_the_picture_comes_in_pieces_with_the_vm_that_it_is_of(self) -> None:
        self.hypervisor.picture = png(filler=300_000)
        answers = [answer async for answer in self.shot()]
        self.assertEqual(b"".join(each.png for each in answers), self.hypervisor.picture)
        self.assertGreater(len(answers), 2)
        record = self.world.node.inventory.sandboxes[self.sandbox].record
        vm = control.VmOfPod(
            sandbox_id=self.sandbox, namespace="default", name="web", vm_id=record.instance_id
        )
        self.assertEqual([each.vm for each in answers if each.HasField("vm")], [vm])

    async def test_it_needs_no_permission_as_the_console_does_not(self) -> None:
        self.allowed = False
        self.assertEqual(len([answer async for answer in self.shot()]), 1)

    async def test_one_that_is_too_large_is_refused(self) -> None:
        self.hypervisor.picture = bytes(MOST_BYTES + 1)
        self.assertIn("lower resolution", await self.refused(Code.RESOURCE_EXHAUSTED, self.shot()))

    async def test_a_hypervisor_that_does_not_answer_is_not_waited_for_long(self) -> None:
        self.hypervisor.picture = Deferred()
        call = self.shot()
        asked = start(self.refused(Code.DEADLINE_EXCEEDED, call))
        await until(lambda: bool(self.world.clock.getDelayedCalls()), "it waits")
        await deferLater(reactor, 0.1, lambda: None)
        self.world.clock.advance(PICTURE_SECONDS)
        await asked

    async def test_pods_without_a_screen_are_refused_with_what_there_is_instead(self) -> None:
        self.hypervisor.picture = None
        self.assertIn("no screen", await self.refused(Code.FAILED_PRECONDITION, self.shot()))
        record = self.world.node.inventory.sandboxes[self.sandbox].record
        del self.world.provider.instances[record.instance_id]
        self.assertIn("infranetes-ctl console", await self.refused(Code.FAILED_PRECONDITION, self.shot()))
        vacant = await start(self.world.sandboxes.run(pod("vacant"), ""))
        self.assertIn("no VM", await self.refused(Code.FAILED_PRECONDITION, self.shot(vacant)))
        await self.refused(Code.NOT_FOUND, self.shot("none"))

    async def test_so_are_those_of_providers_that_show_none(self) -> None:
        record = self.world.node.inventory.sandboxes[self.sandbox].record
        self.world.node.providers.of(record).provider = cast(IPodProvider, FakeProvider(self.world))
        self.assertIn("QEMU has", await self.refused(Code.FAILED_PRECONDITION, self.shot()))


class ConnectionTests(Case):
    async def test_what_goes_in_and_out(self) -> None:
        call = await self.greeted()
        for data in (b"typed", bytes(200_000)):
            await call.send(Request(data=data))
            shown = b""
            while len(shown) < len(data):
                shown += (await anext(aiter(call))).data
            self.assertEqual(shown, data)
        await call.done_sending()
        self.assertEqual([answer async for answer in call], [])
        await until(lambda: self.screen.gone == 1, "the VM's connection is closed")

    async def test_several_viewers_have_a_connection_each(self) -> None:
        first, second = await self.greeted(), await self.greeted()
        await second.send(Request(data=b"b"))
        await first.send(Request(data=b"a"))
        self.assertEqual((await anext(aiter(first))).data, b"a")
        self.assertEqual((await anext(aiter(second))).data, b"b")

    async def test_it_is_written_down_without_what_was_typed_and_shown(self) -> None:
        call = await self.greeted()
        await call.send(Request(data=b"secret"))
        await anext(aiter(call))
        self.world.clock.advance(3.0)
        await call.done_sending()
        await until(lambda: len(self.lines) == 2, "it is written down")
        for line in self.lines:
            self.assertEqual((line["uid"], line["pid"]), (os.getuid(), os.getpid()))
            self.assertEqual((line["sandbox"], line["pod"]), (self.sandbox, "default/web"))
            self.assertNotIn("secret", repr(line))
        self.assertEqual((self.lines[1]["seconds"], self.lines[1]["why"]), (3.0, "the viewer left"))

    async def test_a_vm_that_takes_nothing_has_the_viewer_wait(self) -> None:
        self.screen.reading = False
        call = await self.greeted()
        self.assertLess(await self.taken(lambda data: call.send(Request(data=data))), 8 * AHEAD_BYTES)

    async def test_a_viewer_that_takes_nothing_has_the_vm_wait(self) -> None:
        await self.greeted()
        [screen] = self.screen.connected
        self.assertLess(await self.taken(screen.write), 8 * AHEAD_BYTES)

    async def test_a_viewer_that_goes_away_is_disconnected_from_the_vm(self) -> None:
        call = await self.greeted()
        call.cancel()
        await until(lambda: self.screen.gone == 1, "the VM's connection is closed")
        await until(lambda: len(self.lines) == 2, "it is written down")
        self.assertEqual(self.lines[1]["why"], "the caller went away")

    async def test_a_vm_that_closes_the_connection_ends_the_call(self) -> None:
        call = await self.greeted()
        self.screen.connected[0].close()
        self.assertEqual([answer async for answer in call], [])
        self.assertEqual(self.lines[1]["why"], "the VM has closed the connection")

    async def test_a_vm_that_is_killed_ends_the_call(self) -> None:
        call = await self.greeted()
        self.screen.reading = False
        await call.send(Request(data=b"unread"))
        await deferLater(reactor, 0.1, lambda: None)
        self.screen.connected[0].abort()
        async for _ in call:
            pass
        self.assertEqual(len(self.lines), 2)

    async def test_a_daemon_that_stops_ends_it_and_says_so(self) -> None:
        call = await self.greeted()
        self.calls.stop()
        self.assertIn("the daemon is stopping", await self.refused(Code.UNAVAILABLE, call))
        self.assertIn("the daemon is stopping", self.lines[1]["why"])

    async def test_a_check_connects_nothing(self) -> None:
        answers = [answer async for answer in await self.connect(only_check=True)]
        self.assertEqual([each.begun.sandbox_id for each in answers], [self.sandbox])
        self.assertEqual((self.screen.connected, self.lines), ([], []))


class RefusedTests(Case):
    async def test_unless_it_is_allowed(self) -> None:
        self.allowed = False
        for only_check in (False, True):
            words = await self.refused(Code.PERMISSION_DENIED, await self.connect(only_check=only_check))
            self.assertIn("control.enter = true", words)
        self.assertEqual(self.screen.connected, [])
        self.assertEqual([line["uid"] for line in self.lines], [os.getuid()] * 2)

    async def test_a_pod_that_is_not_there_or_has_no_screen(self) -> None:
        await self.refused(Code.NOT_FOUND, await self.connect("none"))
        self.hypervisor.viewed = None
        for only_check in (False, True):
            await self.refused(Code.FAILED_PRECONDITION, await self.connect(only_check=only_check))
        await start(self.world.sandboxes.stop(self.sandbox))
        await self.refused(Code.FAILED_PRECONDITION, await self.connect())
        await start(self.world.sandboxes.remove(self.sandbox))
        self.assertIn("gone", await self.refused(Code.FAILED_PRECONDITION, await self.connect()))

    async def test_a_screen_that_can_not_be_connected_to(self) -> None:
        self.hypervisor.viewed = UNIXClientEndpoint(reactor, str(self.directory / "nothing"))
        self.assertIn("try again", await self.refused(Code.UNAVAILABLE, await self.connect()))

    async def test_a_screen_that_is_not_connected_in_time(self) -> None:
        class Never:
            def connect(self, factory: object) -> Deferred[None]:
                return Deferred()

        self.hypervisor.viewed = Never()  # type: ignore[assignment]
        asked = start(self.refused(Code.DEADLINE_EXCEEDED, await self.connect()))
        await deferLater(reactor, 0.2, lambda: None)
        self.world.clock.advance(CONNECT_SECONDS)
        await asked

    async def test_input_that_is_wrong(self) -> None:
        for wrong in (
            Request(data=bytes(256 * 1024 + 1)),
            Request(start=control.ConnectScreenStart(pod="web")),
            Request(),
        ):
            call = await self.greeted()
            await call.send(wrong)
            await self.refused(Code.INVALID_ARGUMENT, call)
        await until(lambda: self.screen.gone == 3, "the VM's connections are closed")

    async def test_no_start(self) -> None:
        call = self.stub.ConnectScreen(timeout=50.0)
        await call.done_sending()
        await self.refused(Code.INVALID_ARGUMENT, call)
        call = self.stub.ConnectScreen(timeout=50.0)
        asked = start(self.refused(Code.DEADLINE_EXCEEDED, call))
        await deferLater(reactor, 0.2, lambda: None)
        self.world.clock.advance(START_SECONDS)
        await asked

    async def test_no_more_than_the_limit_at_once(self) -> None:
        for _ in range(MAX_VIEWERS):
            await anext(aiter(await self.connect()))
        words = await self.refused(Code.RESOURCE_EXHAUSTED, await self.connect())
        self.assertIn(f"{MAX_VIEWERS} viewers", words)
