# SPDX-License-Identifier: Apache-2.0
"""Events of both runtimes go to all listeners, with one stream from the delegate."""

from __future__ import annotations

from typing import Any

from infranetes.cri.events import EventCalls
from infranetes.delegate.shadow import ShadowSandboxes
from infranetes_common.concurrency import start
from infranetes_common.wire import cri
from tests.infranetes.delegate.case import OURS, RouterCase
from tests.support.delegate import UNKNOWN, new_id
from tests.support.waiting import until
from tests.txgrpc.support import status_of
from txgrpc import Code, GrpcError, Service


class NoChanges:
    """An inventory in which nothing happens."""

    def __init__(self) -> None:
        self.events = self

    def listen(self, listener: Any) -> None:
        """Do nothing, as there are no events."""


def event(id: str, **labels: str) -> cri.ContainerEventResponse:
    """Return an event of one container or sandbox."""
    status = cri.PodSandboxStatus(id=id, labels=labels)
    return cri.ContainerEventResponse(container_id=id, pod_sandbox_status=status)


class EventTests(RouterCase):
    """Two listeners."""

    def our_services(self) -> list[Service]:
        return [Service(cri.RuntimeService, self.calls)]

    def listeners(self) -> EventCalls:
        inventory: Any = NoChanges()
        self.calls = EventCalls(inventory, lambda: 0)
        return self.calls

    async def listen(self) -> Any:
        before = len(self.calls._listeners)
        call = self.raw.stream("/runtime.v1.RuntimeService/GetContainerEvents", b"", timeout=60)
        self.addCleanup(call.cancel)
        await until(lambda: len(self.calls._listeners) == before + 1, "another listens")
        await until(lambda: bool(self.theirs.listeners), "the delegate is listened to")
        return call

    async def test_everybody_is_told_of_both_s_and_the_delegate_is_listened_to_once(self) -> None:
        one, two = await self.listen(), await self.listen()
        self.calls.tell(event(OURS).SerializeToString())
        theirs = event(new_id())
        self.theirs.tell(theirs)
        for listener in (one, two):
            self.assertEqual(await listener.__anext__(), event(OURS).SerializeToString())
            self.assertEqual(await listener.__anext__(), theirs.SerializeToString() + UNKNOWN)
        self.assertEqual(self.theirs.names(), ["GetContainerEvents"])
        one.cancel()
        await until(lambda: len(self.calls._listeners) == 1, "one has left")
        self.assertEqual(self.theirs.cancelled, [])
        two.cancel()
        await until(lambda: self.theirs.cancelled == ["GetContainerEvents"], "nobody listens")

    async def test_when_the_delegates_stream_ends_so_do_all(self) -> None:
        one, two = await self.listen(), await self.listen()
        self.theirs.end_events()
        for listener in (one, two):
            error = await status_of(listener.__anext__())
            self.assertIs(error.code, Code.UNAVAILABLE)
            self.assertIn("list again", error.message)
        await until(lambda: not self.calls._listeners, "all have left")
        await self.listen()
        self.assertEqual(len(self.theirs.requests), 2)

    async def test_when_the_delegate_dies_so_do_all(self) -> None:
        listener = await self.listen()
        await self.theirs.down()
        self.assertEqual((await status_of(listener.__anext__())).code, Code.UNAVAILABLE)

    async def test_without_the_delegates_events_there_are_none(self) -> None:
        """Half of them would hide pods from kubelet, which lists instead."""
        self.theirs.errors["GetContainerEvents"] = GrpcError(Code.UNIMPLEMENTED, "not here")
        call = self.stub.GetContainerEvents(cri.GetEventsRequest(), timeout=60)
        self.assertEqual((await status_of(call.__anext__())).code, Code.UNIMPLEMENTED)

    async def test_the_end_of_a_shadow_is_not_told_although_its_labels_are_gone(self) -> None:
        """Ids are known from lists, earlier events and shadows that were ended, also by other daemons."""
        listener = await self.listen()
        waiting = start(listener.__anext__())
        listed = self.theirs.add_sandbox("shadow", **{"infranetes.io__shadow_of": OURS})
        await self.stub.ListPodSandbox(cri.ListPodSandboxRequest(), timeout=60)
        told = event(new_id(), **{"infranetes.io/shadow-of": OURS})
        ended = new_id()
        await ShadowSandboxes(self.delegate, "/state").end(ended)
        after = event(new_id())
        deleted = [
            cri.ContainerEventResponse(container_id=id, container_event_type=cri.CONTAINER_DELETED_EVENT)
            for id in (listed, told.container_id, ended)
        ]
        for each in (told, *deleted, after):
            await until(lambda: bool(self.theirs.listeners), "the delegate is listened to")
            self.theirs.tell(each)
        self.assertEqual(await waiting, after.SerializeToString() + UNKNOWN)

    async def test_shadow_sandboxes_have_none(self) -> None:
        listener = await self.listen()
        shadow = event(new_id(), **{"infranetes.io/shadow-of": OURS})
        waiting = start(listener.__anext__())
        self.theirs.tell(shadow)
        await until(lambda: bool(self.theirs.listeners), "the delegate is listened to")
        after = event(new_id())
        self.theirs.tell(after)
        self.assertEqual(await waiting, after.SerializeToString() + UNKNOWN)
