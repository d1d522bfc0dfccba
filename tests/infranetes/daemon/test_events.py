# SPDX-License-Identifier: Apache-2.0
"""GetContainerEvents through the socket."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.endpoints import UNIXClientEndpoint

from infranetes_common.wire import cri
from infranetes_common.wire.cri_rpcs import RuntimeStub
from tests.harness.needs import needs_registry
from tests.infranetes.daemon.case import DaemonCase, reactor
from txgrpc import Channel, Code, GrpcError

CREATED, STARTED = cri.CONTAINER_CREATED_EVENT, cri.CONTAINER_STARTED_EVENT
STOPPED, DELETED = cri.CONTAINER_STOPPED_EVENT, cri.CONTAINER_DELETED_EVENT


class EventCase(DaemonCase):
    """A daemon whose container events are received."""

    async def setUp(self) -> None:
        super().setUp()
        await self.start()

    async def listen(self, channel: Channel | None = None) -> Any:
        """Return a stream of all events from now on."""
        stub = self.runtime if channel is None else RuntimeStub(channel)
        stream = stub.GetContainerEvents(cri.GetEventsRequest(), timeout=None)
        await stub.Version(cri.VersionRequest(), timeout=10.0)  # on the same connection: it is answered later
        self.addCleanup(stream.cancel)
        return stream

    def another(self) -> Channel:
        """Return a separate connection."""
        channel = Channel(reactor, UNIXClientEndpoint(reactor, str(self.socket)))
        self.addCleanup(channel.close)
        return channel

    async def take(self, stream: Any, count: int) -> list[Any]:
        async def some() -> list[Any]:
            return [await anext(stream) for _ in range(count)]

        return await Deferred.fromCoroutine(some()).addTimeout(60.0, reactor)


@needs_registry
class EventTests(EventCase):
    """Listeners get the events."""

    async def test_the_life_of_a_pod(self) -> None:
        stream = await self.listen()
        sandbox = await self.run_pod()
        container = await self.run_container(sandbox, self.box(script="exit 3"))
        events = await self.take(stream, 5)
        self.assertEqual(
            [(one.container_id, one.container_event_type) for one in events],
            [
                (sandbox, CREATED),
                (sandbox, STARTED),
                (container, CREATED),
                (container, STARTED),
                (container, STOPPED),
            ],
        )
        last = events[-1]
        self.assertEqual(
            (last.pod_sandbox_status.id, last.pod_sandbox_status.state), (sandbox, cri.SANDBOX_READY)
        )
        (status,) = last.containers_statuses
        self.assertEqual((status.state, status.exit_code), (cri.CONTAINER_EXITED, 3))
        self.assertEqual(sorted(one.created_at for one in events), [one.created_at for one in events])
        await self.remove_pod(sandbox)
        events = await self.take(stream, 3)
        self.assertEqual(
            [(one.container_id, one.container_event_type) for one in events],
            [(sandbox, STOPPED), (container, DELETED), (sandbox, DELETED)],
        )
        self.assertFalse(events[-1].HasField("pod_sandbox_status"))

    async def test_one_that_reads_nothing_holds_up_neither_the_others_nor_the_daemon(self) -> None:
        stuck = await self.listen(self.another())
        listening = await self.listen()
        sandbox = await self.run_pod(annotations={"large": "x" * 200_000})
        await self.take(listening, 2)
        for number in range(30):  # of 200 kB each: more than its window and its queue hold
            container = await self.create(sandbox, self.box(f"c{number}"))
            (event,) = await self.take(listening, 1)
            self.assertEqual((event.container_id, event.container_event_type), (container, CREATED))
            request = cri.RemoveContainerRequest(container_id=container)
            await self.runtime.RemoveContainer(request, timeout=30.0)
            await self.take(listening, 1)
        self.assertIn("a listener to events is dropped", self.log)
        with self.assertRaises(GrpcError) as caught:
            while True:
                await self.take(stuck, 1)
        self.assertEqual(caught.exception.code, Code.RESOURCE_EXHAUSTED, caught.exception.message)

    async def test_those_who_vanish_leave_nothing(self) -> None:
        for _ in range(10):  # more listeners than there may be
            gone = [self.another() for _ in range(8)]
            for channel in gone:
                await self.listen(channel)
            for channel in gone:
                await channel.close()
        listening = await self.listen()
        sandbox = await self.run_pod()
        (event, _) = await self.take(listening, 2)
        self.assertEqual(event.container_id, sandbox)

    async def test_a_daemon_that_stops_waits_for_no_listener(self) -> None:
        listening = await self.listen(self.another())
        assert self.process is not None
        self.process.terminate()
        with self.assertRaises(GrpcError) as caught:
            await self.take(listening, 1)
        self.assertEqual(caught.exception.code, Code.UNAVAILABLE)
        self.assertIn("the daemon is stopping", caught.exception.message)
        await self.ended()
