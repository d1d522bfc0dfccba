# SPDX-License-Identifier: Apache-2.0
"""The identity comes from the cloud, after which access to the metadata service is closed."""

from __future__ import annotations

import base64
import json
import os
import socket
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs
from twisted.internet import reactor as _reactor
from twisted.internet.task import deferLater
from twisted.internet.tcp import Server
from twisted.internet.testing import MemoryReactorClock
from twisted.logger import LogLevel, capturedLogs, formatEvent
from twisted.trial.unittest import SynchronousTestCase, TestCase
from twisted.web.resource import Resource
from twisted.web.server import Site

from infranetes_common import reactors
from infranetes_common.concurrency import start
from infranetes_common.errors import FailedPrecondition, InvalidArgument, Unavailable
from infranetes_common.identity import encode
from infranetes_common.wire import vmserver
from tests.harness.needs import needs_netns
from tests.support.clouds.imds import Imds
from tests.support.waiting import until
from tests.vmserver.harness import SANDBOX, Agent, run_directory
from vmserver import config as configuration
from vmserver.config import IdentityConfig
from vmserver.daemon import Vmserver
from vmserver.identity import metadata
from vmserver.identity.metadata import CloudIdentity, MetadataGate, MetadataService, detect

reactor: Any = _reactor
ROOT = Path(__file__).resolve().parents[3]


def connections() -> list[Server]:
    """Return the connections that this process has accepted and not closed."""
    every = (*reactor.getReaders(), *reactor.getWriters())
    return [each for each in every if isinstance(each, Server)]


class Gcp(Resource):
    """Source: Compute Engine, "View and query VM metadata"."""

    isLeaf = True

    def render_GET(self, request: Any) -> bytes:
        wanted = b"/computeMetadata/v1/instance/attributes/infranetes-identity"
        if request.getHeader("metadata-flavor") != "Google" or request.path != wanted:
            request.setResponseCode(403)
            return b"no"
        return b'{"the": "identity"}'


class Azure(Resource):
    """Source: Azure, "Azure Instance Metadata Service", section "Get user data". :param data: in base64."""

    isLeaf = True

    def __init__(self, data: bytes) -> None:
        super().__init__()
        self._data = data

    def render_GET(self, request: Any) -> bytes:
        wanted = b"/metadata/instance/compute/userData?api-version=2021-01-01&format=text"
        if request.getHeader("metadata") != "true" or request.uri != wanted:
            request.setResponseCode(400)
            return b"Bad request"
        return self._data


class Nova(Resource):
    """Source: Nova user guide, "Metadata"."""

    isLeaf = True

    def __init__(self, *told: bytes, user_data: bytes = b'{"the": "identity"}') -> None:
        super().__init__()
        self._told = list(told)  # the answers, one after the other, about the server; the last one stays
        self._user_data = user_data

    def render_GET(self, request: Any) -> bytes:
        if request.path == b"/openstack/latest/meta_data.json" and self._told:
            return self._told.pop(0) if len(self._told) > 1 else self._told[0]
        if request.path != b"/openstack/latest/user_data":
            request.setResponseCode(404)
            return b"no"
        return self._user_data


def meta(**items: str) -> bytes:
    """Return what Nova tells of a server with this metadata."""
    named = {key.replace("_", "-"): value for key, value in items.items()}
    return json.dumps({"uuid": "1", "meta": {"infranetes-token": "t", **named}}).encode()


class CloudIdentityTests(TestCase):
    def setUp(self) -> None:
        self.offered: list[bytes] = []
        self.refusals = 0
        self.commands: list[list[str]] = []

    async def offer(self, document: bytes) -> int:
        if self.refusals:
            self.refusals -= 1
            raise FailedPrecondition("not yet")
        self.offered.append(document)
        return 2475

    async def served(self, resource: Resource, source: str) -> None:
        """Wait until the identity that `resource` serves is taken on."""
        port = reactor.listenTCP(0, Site(resource, timeout=None), interface="127.0.0.1")
        self.addCleanup(port.stopListening)
        await self.taken(source, f"http://127.0.0.1:{port.getHost().port}")

    async def taken(self, source: str, endpoint: str) -> None:
        self.patch(metadata, "POLL_SECONDS", 0.05)
        identity = CloudIdentity(
            reactor, source, endpoint, self.offer, lambda: not self.offered, self.run_program
        )
        identity.start()
        self.addCleanup(identity.stop)
        while not self.offered:
            await deferLater(reactor, 0.02)
        await deferLater(reactor, 0.15)
        self.assertEqual(self.offered, [b'{"the": "identity"}'])

    async def run_program(self, command: list[str], stdin: bytes) -> bytes:
        self.commands.append(command)
        if len(self.commands) == 1:
            raise Unavailable("vmtoolsd is not up yet")
        return base64.b64encode(b'{"the": "identity"}\n') + b"\n"

    async def test_it_is_looked_for_often_while_the_machine_boots_then_once_a_second(self) -> None:
        clock: Any = MemoryReactorClock()
        tried: list[float] = []

        async def run(command: list[str], stdin: bytes) -> bytes:
            tried.append(clock.seconds())
            raise Unavailable("vmtoolsd is not up yet")

        identity = CloudIdentity(clock, "vsphere", "", self.offer, lambda: True, run)
        identity.start()
        clock.pump([0.01] * 2000)
        identity.stop()
        self.assertGreater(len([each for each in tried if each < 1.0]), 4)
        waits = [later - at for at, later in pairwise(tried)]
        self.assertLess(max(waits), 1.1)
        self.assertGreater(min(waits[10:]), 0.9)
        clock.pump([0.01] * 200)
        self.assertLess(max(tried), 20.1)

    async def test_user_data_by_a_session_as_ec2_has_it(self) -> None:
        await self.served(Imds({"127.0.0.1": b'{"the": "identity"}'}), "aws")

    async def test_user_data_that_comes_late(self) -> None:
        user_data: dict[str, bytes] = {}
        reactor.callLater(0.3, user_data.update, {"127.0.0.1": b'{"the": "identity"}\n'})
        await self.served(Imds(user_data), "aws")

    async def test_a_service_that_is_silent_is_told_of_once_and_asked_again(self) -> None:
        self.patch(metadata, "_SECONDS", 0.1)
        service = Imds({"127.0.0.1": b'{"the": "identity"}'})
        service.silent = "all"
        with capturedLogs() as logged:
            serving = start(self.served(service, "aws"))
            await until(lambda: service.asked > 2, "it is silent")
            service.silent, before = "body", service.asked
            await until(lambda: service.asked > before + 2, "it is silent in the middle of an answer")
            service.silent = ""
            await serving
        await until(lambda: not connections(), "no connection is left open")
        said = [formatEvent(each) for each in logged if each["log_level"] is LogLevel.warn]
        self.assertEqual(
            said, ["no identity from the cloud yet: the metadata service does not answer within 0.1 s"]
        )

    async def test_a_service_that_takes_no_connection_is_as_silent(self) -> None:
        self.patch(metadata, "_SECONDS", 0.1)
        with socket.socket() as full, socket.socket() as first, socket.socket() as second:
            full.bind(("127.0.0.1", 0))
            full.listen(0)
            for each in (first, second):  # its queue has room for one more than it says
                each.setblocking(False)
                each.connect_ex(full.getsockname())
            service = MetadataService(reactor, f"http://127.0.0.1:{full.getsockname()[1]}")
            error = await self.assertFailure(start(service.aws()), Unavailable)
        self.assertEqual(str(error), "the metadata service does not answer within 0.1 s")

    async def test_an_agent_that_starts_again_serves_without_the_service(self) -> None:
        agent = Agent(reactor, run_directory(self))
        self.addCleanup(lambda: start(agent.stop()))
        await agent.start()
        await agent.stop()
        agent.config = attrs.evolve(
            agent.config, identity=IdentityConfig(source="aws", endpoint="http://127.0.0.1:1", apply=False)
        )
        self.patch(agent.authority, "identity", None)  # it does not get another one
        await agent.start()
        info = await agent.stub().Info(vmserver.InfoRequest(), timeout=10.0)
        self.assertEqual(info.sandbox_id, SANDBOX)

    async def test_what_cloud_init_keeps_of_user_data_once_it_is_there(self) -> None:
        kept = Path(self.mktemp()) / "instance" / "user-data.txt"
        self.patch(metadata, "POLL_SECONDS", 0.05)
        identity = CloudIdentity(
            reactor, "cloud-init", "", self.offer, lambda: not self.offered, user_data=kept
        )
        with capturedLogs() as logged:
            identity.start()
            self.addCleanup(identity.stop)
            await deferLater(reactor, 0.3)
            self.assertEqual(self.offered, [])
            kept.parent.mkdir(parents=True)
            kept.write_bytes(b'{"the": "identity"}\n')
            await until(lambda: self.offered, "it is read")
            await deferLater(reactor, 0.15)
        self.assertEqual(self.offered, [b'{"the": "identity"}'])
        said = [formatEvent(each) for each in logged if each["log_level"] is LogLevel.warn]
        self.assertEqual(len(said), 1, said)
        self.assertIn(f"{kept} of cloud-init can't be read: No such file", said[0])

    async def test_cloud_init_keeps_it_where_the_agent_looks_by_default(self) -> None:
        directory = run_directory(self)
        agent = Agent(reactor, directory)
        self.addCleanup(lambda: start(agent.stop()))
        kept = directory / "user-data.txt"
        kept.write_text(encode(agent.authority.identity(SANDBOX)).decode())
        self.assertEqual(str(configuration.USER_DATA), "/var/lib/cloud/instance/user-data.txt")
        self.patch(configuration, "USER_DATA", kept)
        agent.config = attrs.evolve(agent.config, identity=IdentityConfig(source="cloud-init", apply=False))
        agent.service = service = Vmserver(reactor, agent.config, provider=agent.make_provider())
        service.startService()
        await until(lambda: service.port, "it has its identity")
        info = await agent.stub().Info(vmserver.InfoRequest(), timeout=10.0)
        self.assertEqual(info.sandbox_id, SANDBOX)

    async def test_an_identity_that_is_refused_is_offered_again(self) -> None:
        self.refusals = 2
        await self.served(Imds({"127.0.0.1": b'{"the": "identity"}'}), "aws")

    async def test_an_attribute_as_gcp_has_it(self) -> None:
        await self.served(Gcp(), "gcp")

    async def test_user_data_as_nova_has_it(self) -> None:
        await self.served(Nova(), "openstack")

    async def test_user_data_of_a_server_whose_metadata_have_no_identity(self) -> None:
        await self.served(Nova(meta()), "openstack")

    async def test_parts_in_a_servers_metadata_go_before_its_user_data(self) -> None:
        parts = {"infranetes_identity_1": '{"the": ', "infranetes_identity_2": '"identity"}'}
        whole = meta(infranetes_identity="2", **parts)
        await self.served(Nova(whole, user_data=b"old"), "openstack")

    async def test_a_server_that_was_stopped_waits_for_them_whatever_its_user_data(self) -> None:
        waits, half = meta(infranetes_identity="0"), meta(infranetes_identity="2", infranetes_identity_1="{")
        whole = meta(infranetes_identity="1", infranetes_identity_1='{"the": "identity"}')
        bad = (
            b"no JSON",
            b"[]",
            meta(infranetes_identity="many"),
            b'{"meta": {"infranetes-identity": null}}',
        )
        await self.served(Nova(waits, half, *bad, waits, whole, user_data=b"old"), "openstack")

    async def test_user_data_as_azure_has_it(self) -> None:
        await self.served(Azure(base64.b64encode(b'{"the": "identity"}\n')), "azure")

    async def test_user_data_of_azure_that_is_not_base64_is_refused(self) -> None:
        port = reactor.listenTCP(0, Site(Azure(b"{}"), timeout=None), interface="127.0.0.1")
        self.addCleanup(port.stopListening)
        asked = metadata.MetadataService(reactor, f"http://127.0.0.1:{port.getHost().port}")
        try:
            await asked.azure()
        except InvalidArgument as error:
            self.assertIn("base64", str(error))
        else:
            self.fail("it was taken")

    async def test_guestinfo_as_vsphere_has_it_is_erased_then(self) -> None:
        await self.taken("vsphere", "")
        self.assertEqual(self.commands[1], ["vmtoolsd", "--cmd", "info-get guestinfo.infranetes.identity"])
        self.assertEqual(
            self.commands[2:], [["vmtoolsd", "--cmd", "info-set guestinfo.infranetes.identity -"]]
        )

    async def test_an_answer_without_end_is_broken_off(self) -> None:
        class Endless(Resource):
            isLeaf = True

            def render(self, request: Any) -> bytes:
                return b"x" * 1_000_000

        port = reactor.listenTCP(0, Site(Endless(), timeout=None), interface="127.0.0.1")
        self.addCleanup(port.stopListening)
        asked = metadata.MetadataService(reactor, f"http://127.0.0.1:{port.getHost().port}")
        try:
            await asked.gcp()
        except InvalidArgument as error:
            self.assertIn("bytes", str(error))
        else:
            self.fail("it was taken")
        await until(lambda: not connections(), "the server has lost its client")


class DetectTests(SynchronousTestCase):
    def test_each_cloud_by_its_vendor(self) -> None:
        directory = Path(self.mktemp())
        directory.mkdir()
        for vendor, source in (
            ("Amazon EC2", "aws"),
            ("Google", "gcp"),
            ("Microsoft Corporation", "azure"),
            ("OpenStack Foundation", "openstack"),
            ("VMware, Inc.", "vsphere"),
        ):
            (directory / "sys_vendor").write_text(vendor + "\n")
            self.assertEqual(detect(directory), source)
        (directory / "sys_vendor").write_text("A vendor of Nova\n")
        (directory / "product_name").write_text("OpenStack Compute\n")
        self.assertEqual(detect(directory), "openstack")
        (directory / "product_name").write_text("Standard PC\n")
        (directory / "sys_vendor").write_text("QEMU\n")
        self.assertRaises(FailedPrecondition, detect, directory)
        self.assertRaises(FailedPrecondition, detect, directory / "none")


_PROBE = """
import asyncio, socket, subprocess, sys, threading
from twisted.internet import reactor
from twisted.internet.defer import Deferred, ensureDeferred
from twisted.internet.threads import deferToThread
from vmserver.network.marked_connections import MARK
from vmserver.identity.metadata import MetadataGate

for command in ("ip link set lo up", "ip addr add 169.254.169.254/32 dev lo",
    "ip addr add 168.63.129.16/32 dev lo", "ip addr add 10.9.9.9/32 dev lo"):
    subprocess.run(command.split(), check=True)
listeners = []
for host in ("169.254.169.254", "168.63.129.16"):
    for port in (80, 53):
        listener = socket.create_server((host, port))
        listeners.append(listener)

def reaches(port):
    reached = {reaches_at(host, port) for host in ("169.254.169.254", "168.63.129.16")}
    return reached.pop() if len(reached) == 1 else "differs"

def reaches_at(host, port):
    try:
        socket.create_connection((host, port), 30, ("10.9.9.9", 0)).close()
        return True
    except ConnectionRefusedError:
        return False

def agent_reaches():
    with socket.socket() as marked:
        marked.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, MARK)
        marked.bind(("10.9.9.9", 0))
        return marked.connect_ex(("169.254.169.254", 80)) == 0

async def main():
    gate = MetadataGate(reactor, True)
    print(reaches(80), reaches(53))
    for step in (gate.close(), gate.close(), gate.configure({"infranetes.io/metadata-access": "allow"}),
                 gate.configure({"infranetes.io/metadata-access": "allow"}), gate.configure({})):
        await step
        print(reaches(80), reaches(53))
        if not agent_reaches():
            print("the agent itself is shut out")
    reactor.stop()

def failed(failure):
    failure.printTraceback(file=sys.stdout)
    reactor.stop()

reactor.callWhenRunning(lambda: Deferred.fromCoroutine(main()).addErrback(failed))
reactor.run()
"""


class RunnerTests(TestCase):
    """How programs are run."""

    async def test_what_a_signal_ended_has_failed(self) -> None:
        run = metadata.runner(reactors.installed())
        with self.assertRaises(Unavailable) as caught:
            await run(["sh", "-c", "kill -9 $$"], b"")
        self.assertIn("was killed by SIGKILL", str(caught.exception))
        self.assertEqual(await run(["sh", "-c", "cat"], b"words"), b"words")


class GateTests(TestCase):
    @needs_netns
    def test_it_is_closed_and_opened_and_the_resolver_stays(self) -> None:
        """In a network namespace of its own, with the service on the loopback interface."""
        done = subprocess.run(
            ["unshare", "--net", sys.executable, "-c", _PROBE],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=100,
        )
        opened, closed = "True True", "False True"
        self.assertEqual(
            done.stdout.split("\n")[:-1], [opened, closed, closed, opened, opened, closed], done.stderr
        )

    async def test_without_a_cloud_only_the_annotation_is_checked(self) -> None:
        gate = MetadataGate(reactor, False)
        await gate.close()
        await gate.configure({"infranetes.io/metadata-access": "allow"})
        await self.assertFailure(
            _deferred(gate.configure({"infranetes.io/metadata-access": "perhaps"})), InvalidArgument
        )


def _deferred(coroutine: Any) -> Any:
    from twisted.internet.defer import Deferred

    return Deferred.fromCoroutine(coroutine)
