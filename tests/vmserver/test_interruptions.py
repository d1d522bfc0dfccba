# SPDX-License-Identifier: Apache-2.0
"""A notice that the cloud will take a machine away is seen, and what runs there is stopped in time."""

from __future__ import annotations

import json
from typing import Any, cast

from twisted.internet.address import IPv4Address
from twisted.internet.defer import Deferred, succeed
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase, TestCase
from twisted.web.resource import Resource
from twisted.web.server import Site

from infranetes_common.concurrency import deferred
from infranetes_common.errors import InvalidArgument, Unavailable
from infranetes_common.reactors import installed
from infranetes_common.wire import cri
from infranetes_common.wire import vmserver as messages
from tests.harness.needs import needs_root
from tests.support.clouds.imds import Imds
from tests.support.waiting import until
from vmserver import interruptions
from vmserver.containers.interface import IContainerProvider
from vmserver.identity import metadata
from vmserver.identity.metadata import MetadataService
from vmserver.interruptions import (
    POLL_SECONDS,
    Interruption,
    Interruptions,
    find_by,
    read_aws,
    read_azure,
    read_gcp,
)

reactor = installed()
SPOT = "meta-data/spot/instance-action"


class Containers:
    """The part of a provider that is used: one container that runs, and one that has exited."""

    def __init__(self) -> None:
        self.stopped: list[tuple[str, int]] = []

    def containers(self) -> Deferred[list[messages.ContainerState]]:
        states = (("a", cri.CONTAINER_RUNNING), ("b", cri.CONTAINER_EXITED))
        return succeed([messages.ContainerState(id=id, state=state) for id, state in states])

    def stop_container(self, id: str, grace_seconds: int) -> Deferred[messages.ContainerState]:
        self.stopped.append((id, grace_seconds))
        return succeed(messages.ContainerState(id=id, state=cri.CONTAINER_EXITED))


class InterruptionsTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.clock.advance(1000.0)
        self.notice: Interruption | None = None
        self.trouble = False
        self.told: list[Interruption] = []
        self.looks = 0
        self.containers = Containers()
        self.interruptions = Interruptions(
            self.clock, self.find, self.told.append, lambda: cast(IContainerProvider, self.containers)
        )
        self.addCleanup(self.interruptions.stop)

    async def find(self) -> Interruption | None:
        self.looks += 1
        if self.trouble:
            raise Unavailable("the metadata service does not answer")
        return self.notice

    def test_the_notice_is_looked_for_until_there_is_one_and_told_once(self) -> None:
        for _ in range(2):
            self.interruptions.begin()
        self.clock.pump([POLL_SECONDS] * 3)
        self.assertEqual((self.looks, self.told), (4, []))
        self.trouble = True
        self.clock.pump([POLL_SECONDS] * 2)
        self.trouble, self.notice = False, Interruption(1200.0, "spot")
        self.clock.pump([POLL_SECONDS] * 5)
        self.assertEqual((self.looks, self.told), (7, [self.notice]))

    def test_kubelet_has_most_of_the_time_and_what_still_runs_then_is_stopped(self) -> None:
        for left, wait, grace in ((120.0, 90.0, 25), (30.0, 15.0, 10), (4.0, 2.0, 0), (-60.0, 0.0, 0)):
            self.setUp()
            self.notice = Interruption(1000.0 + left, "spot")
            self.interruptions.begin()
            if wait:
                self.clock.advance(wait - 0.1)
                self.assertEqual(self.containers.stopped, [])
            self.clock.advance(0.2)
            self.assertEqual(self.containers.stopped, [("a", grace)])

    def test_an_agent_that_ends_stops_nothing(self) -> None:
        self.notice = Interruption(1120.0, "spot")
        self.interruptions.begin()
        for _ in range(2):
            self.interruptions.stop()
        self.clock.advance(200.0)
        self.assertEqual((self.containers.stopped, self.clock.getDelayedCalls()), ([], []))


class NoticeTests(SynchronousTestCase):
    def test_ec2_says_when(self) -> None:
        # As in the user guide.
        notice = read_aws(b'{"action": "terminate", "time": "2017-09-18T08:22:00Z"}')
        self.assertEqual(notice.at, 1505722920.0)
        self.assertIn("2017-09-18T08:22:00Z (terminate)", notice.reason)

    def test_what_is_no_notice_is_refused(self) -> None:
        for text in (b"", b"<html>", b"[]", b"{}", b'{"action": "stop", "time": 5}', b'{"time": "soon"}'):
            self.assertRaises(InvalidArgument, read_aws, text)

    def test_azure_says_when(self) -> None:
        # As in its manual, with a second event.
        event = {"EventId": "A", "EventType": "Preempt", "NotBefore": "Mon, 19 Sep 2016 18:29:47 GMT"}
        reboot = {**event, "EventType": "Reboot", "NotBefore": "Mon, 19 Sep 2016 18:00:00 GMT"}
        notice = read_azure(json.dumps({"DocumentIncarnation": 2, "Events": [reboot, event]}).encode(), 0.0)
        assert notice is not None
        self.assertEqual(notice.at, 1474309787.0)
        self.assertIn("2016-09-19T18:29:47+00:00", notice.reason)

    def test_azure_has_begun(self) -> None:
        begun = read_azure(b'{"Events": [{"EventType": "Preempt", "NotBefore": ""}]}', 1000.0)
        assert begun is not None
        self.assertEqual(begun.at, 1000.0)

    def test_other_events_of_azure_take_nothing_away(self) -> None:
        self.assertIsNone(read_azure(b'{"DocumentIncarnation": 1, "Events": []}', 0.0))
        self.assertIsNone(read_azure(b'{"Events": [{"EventType": "Freeze", "NotBefore": "x"}]}', 0.0))

    def test_what_are_no_events_is_refused(self) -> None:
        for text in (b"", b"[]", b"{}", b'{"Events": [5]}', b'{"Events": [{}]}', b'{"Events": 5}'):
            self.assertRaises(InvalidArgument, read_azure, text, 0.0)
        self.assertRaises(
            InvalidArgument, read_azure, b'{"Events": [{"EventType": "Preempt", "NotBefore": "soon"}]}', 0.0
        )

    def test_compute_engine_says_that_it_is_soon(self) -> None:
        self.assertIsNone(read_gcp(b"FALSE", 1000.0))
        notice = read_gcp(b"TRUE\n", 1000.0)
        assert notice is not None
        self.assertEqual(notice.at, 1030.0)


class Events(Resource):
    """Azure's, source: Virtual Machines, "Scheduled Events for Linux VMs"."""

    isLeaf = True
    events = b""

    def render_GET(self, request: Any) -> bytes:  # Any: twisted.web's request
        wanted = b"/metadata/scheduledevents?api-version=2020-07-01"
        if request.getHeader("metadata") != "true" or request.uri != wanted:
            request.setResponseCode(400)
        return b'{"DocumentIncarnation": 1, "Events": [' + self.events + b"]}"


@needs_root
class MetadataTests(TestCase):
    """With EC2's protocol, on connections with the agent's mark."""

    @deferred
    async def test_azures_events_are_asked_for(self) -> None:
        events = Events()
        site: Any = Site(events, timeout=None)  # Any: its type is too narrow for listenTCP
        port = reactor.listenTCP(0, site, interface="127.0.0.1")
        self.addCleanup(port.stopListening)
        address = port.getHost()
        assert isinstance(address, IPv4Address)
        service = MetadataService(reactor, f"http://127.0.0.1:{address.port}", marked=True)
        find = find_by("azure", service, reactor)
        assert find is not None
        self.assertIsNone(await find())
        events.events = b'{"EventType": "Preempt", "NotBefore": "Mon, 19 Sep 2016 18:29:47 GMT"}'
        notice = await find()
        assert notice is not None
        self.assertEqual(notice.at, 1474309787.0)

    @deferred
    async def test_there_is_no_notice_before_there_is_one(self) -> None:
        service = Imds({})
        site: Any = Site(service, timeout=None)  # Any: its type is too narrow for listenTCP
        port = reactor.listenTCP(0, site, interface="127.0.0.1")
        self.addCleanup(port.stopListening)
        address = port.getHost()
        assert isinstance(address, IPv4Address)
        endpoint = f"http://127.0.0.1:{address.port}"
        find = find_by("aws", MetadataService(reactor, endpoint, marked=True), reactor)
        assert find is not None
        self.assertIsNone(await find())
        service.documents[SPOT] = b'{"action": "terminate", "time": "2017-09-18T08:22:00Z"}'
        notice = await find()
        assert notice is not None
        self.assertEqual(notice.at, 1505722920.0)
        self.assertIsNone(find_by("vsphere", MetadataService(reactor), reactor))

    @deferred
    async def test_a_service_that_is_away_or_silent_is_asked_again(self) -> None:
        self.patch(metadata, "_SECONDS", 0.1)
        self.patch(interruptions, "POLL_SECONDS", 0.02)
        service = Imds({})
        site: Any = Site(service, timeout=None)  # Any: its type is too narrow for listenTCP
        port = reactor.listenTCP(0, site, interface="127.0.0.1")
        address = port.getHost()
        assert isinstance(address, IPv4Address)
        await (port.stopListening() or succeed(None))
        find = find_by("aws", MetadataService(reactor, f"http://127.0.0.1:{address.port}"), reactor)
        assert find is not None
        looks: list[None] = []

        async def counted() -> Interruption | None:
            looks.append(None)
            return await find()

        told: list[Interruption] = []
        looking = Interruptions(reactor, counted, told.append, lambda: cast(IContainerProvider, Containers()))
        looking.begin()
        self.addCleanup(looking.stop)
        await until(lambda: len(looks) > 2, "it is away")
        service.silent = "all"
        service.documents[SPOT] = b'{"action": "terminate", "time": "2017-09-18T08:22:00Z"}'
        port = reactor.listenTCP(address.port, site, interface="127.0.0.1")
        self.addCleanup(port.stopListening)
        await until(lambda: service.asked > 2, "it is silent")
        service.silent, before = "body", service.asked
        await until(lambda: service.asked > before + 2, "it is silent in the middle of an answer")
        service.silent = ""
        await until(lambda: told, "it answers")
