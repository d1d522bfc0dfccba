# SPDX-License-Identifier: Apache-2.0
"""The farm: many real agents in one process, controlled over a unix socket."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import HostnameEndpoint, UNIXClientEndpoint, wrapClientTLS
from twisted.internet.protocol import Factory
from twisted.internet.task import deferLater
from twisted.protocols.basic import LineOnlyReceiver
from twisted.trial.unittest import TestCase

from infranetes_common.reactors import installed
from infranetes_common.wire import cri
from infranetes_common.wire import vmserver as messages
from infranetes_common.wire.vmserver_rpcs import AgentStub
from tests.contract.container_provider_case import busybox_image
from tests.harness.needs import needs_programs
from tests.support import warm
from tests.support.dockerd import archive
from tests.vmserver.harness import Client
from tests.vmserver.pki import Authority
from txgrpc import Channel, Code, GrpcError

reactor = installed()
ROOT = Path(__file__).resolve().parents[2]


class _Line(LineOnlyReceiver):
    delimiter = b"\n"
    MAX_LENGTH = 1 << 24

    def __init__(self) -> None:
        self.answers: dict[Any, Deferred[Any]] = {}
        self.events: list[tuple[str, str]] = []
        self.gone: Deferred[None] = Deferred()

    def lineReceived(self, line: bytes) -> None:
        said = json.loads(line)
        if "event" in said:
            self.events.append((said["event"], said["vm"]["id"]))
        else:
            self.answers.pop(said["seq"]).callback(said)

    def connectionLost(self, reason: Any = None) -> None:
        self.gone.callback(None)


class FarmTests(TestCase):
    """A farm as a process of its own."""

    @classmethod
    def setUpClass(cls) -> None:
        warm.wait_until_ready()

    async def setUp(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="farm-"))
        self.authority = Authority()
        self.lines: list[_Line] = []
        self.channels: list[Channel] = []
        self.process: warm.Process | None = None
        self.addCleanup(lambda: Deferred.fromCoroutine(self._clean_up()))
        await self.start()

    async def _clean_up(self) -> None:
        for channel in self.channels:
            await channel.close()
        self.kill()
        for line in self.lines:
            await line.gone
        shutil.rmtree(self.directory)

    def command(self) -> list[str]:
        """Return the arguments of Python that run the farm."""
        socket, state = str(self.directory / "socket"), str(self.directory / "state")
        return ["-m", "infranetes_simulation.farm", "--socket", socket, "--state", state]

    async def start(self) -> None:
        self.process = warm.Process(self.command(), 2, ROOT, os.environ)
        until = time.monotonic() + 100
        while True:
            try:
                self.line = await self.connect()
                return
            except Exception:
                self.assertLess(time.monotonic(), until)
                await deferLater(reactor, 0.05, lambda: None)

    def kill(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.process = None

    async def connect(self) -> _Line:
        endpoint = UNIXClientEndpoint(reactor, str(self.directory / "socket"))
        line: _Line = await endpoint.connect(Factory.forProtocol(_Line))
        self.lines.append(line)
        return line

    async def ask(self, op: str, line: _Line | None = None, **fields: Any) -> Any:
        line = line or self.line
        seq = f"{op}-{time.monotonic()}-{len(line.answers)}"
        answer: Deferred[Any] = Deferred()
        line.answers[seq] = answer
        line.sendLine(json.dumps({"seq": seq, "op": op, **fields}).encode())
        return await answer.addTimeout(20, reactor)

    async def boot(self, id: str, **fields: Any) -> Any:
        identity = attrs.asdict(self.authority.identity(id))
        answer = await self.ask("boot", id=id, identity=identity, **fields)
        self.assertTrue(answer["ok"], answer)
        return answer["vm"]

    async def running(self, id: str, state: str = "running") -> Any:
        until = time.monotonic() + 100
        while True:
            vm = (await self.ask("get", id=id))["vm"]
            if vm["state"] == state:
                return vm
            self.assertLess(time.monotonic(), until, vm)
            await deferLater(reactor, 0.02, lambda: None)

    def stub(self, vm: Any) -> AgentStub:
        node = Client(self.authority, self.authority.node())
        endpoint = wrapClientTLS(node, HostnameEndpoint(reactor, vm["host"], vm["port"]))
        channel = Channel(reactor, endpoint)
        self.channels.append(channel)
        return AgentStub(channel)

    async def refused(self, vm: Any, code: Code, seconds: float = 1.0) -> None:
        with self.assertRaises(GrpcError) as caught:
            await self.stub(vm).Info(messages.InfoRequest(), timeout=seconds)
        self.assertEqual(caught.exception.code, code)

    @needs_programs("busybox")
    async def test_a_vm_has_a_real_agent(self) -> None:
        vm = await self.boot("a", tags={"cluster": "c"}, delay=0.3)
        self.assertEqual((vm["state"], vm["port"], vm["tags"]), ("pending", 0, {"cluster": "c"}))
        vm = await self.running("a")
        stub = self.stub(vm)
        self.assertEqual((await stub.Info(messages.InfoRequest(), timeout=5.0)).sandbox_id, "a")
        built = busybox_image()
        data = archive(built, present=2)
        load = [
            messages.LoadImageRequest(header=messages.LoadImageHeader(image_id=built.id)),
            messages.LoadImageRequest(data=data),
        ]
        await stub.LoadImage(iter(load), timeout=10.0)
        request = messages.CreateContainerRequest(id="c", image_id=built.id)
        await stub.CreateContainer(request, timeout=5.0)
        state = (await stub.StartContainer(messages.StartContainerRequest(id="c"), timeout=5.0)).state
        self.assertEqual(state.state, cri.CONTAINER_RUNNING)

    async def test_booting_twice_is_once_and_so_is_ending(self) -> None:
        first = await self.boot("a")
        again = await self.boot("a", tags={"other": 1})
        self.assertEqual((again["created_at"], again["tags"]), (first["created_at"], {}))
        vm = await self.running("a")
        for _ in range(2):
            self.assertTrue((await self.ask("end", id="a"))["ok"])
        self.assertEqual((await self.ask("list"))["vms"], [])
        self.assertEqual([file.name for file in (self.directory / "state").iterdir()], ["lock"])
        await self.refused(vm, Code.UNAVAILABLE)

    async def test_behaviours(self) -> None:
        await self.boot("never", behaviour="never")
        await self.boot("no-agent", behaviour="no-agent")
        await self.boot("unreachable", behaviour="unreachable")
        await self.boot("dies", behaviour="dies-after", after=0.3)
        await self.refused(await self.running("no-agent"), Code.UNAVAILABLE)
        await self.refused(await self.running("unreachable"), Code.DEADLINE_EXCEEDED)
        dead = await self.running("dies", "ended")
        self.assertIn("died", dead["detail"])
        self.assertEqual((await self.ask("get", id="never"))["vm"]["state"], "pending")

    async def test_behaviours_change_under_way_and_the_port_stays(self) -> None:
        await self.boot("a")
        vm = await self.running("a")
        stub = self.stub(vm)
        await stub.Info(messages.InfoRequest(), timeout=5.0)
        for behaviour, code in (("unreachable", Code.DEADLINE_EXCEEDED), ("no-agent", Code.UNAVAILABLE)):
            changed = (await self.ask("behave", id="a", behaviour=behaviour))["vm"]
            self.assertEqual((changed["behaviour"], changed["port"]), (behaviour, vm["port"]))
            await self.refused(vm, code)
        await self.ask("behave", id="a", behaviour="normal")
        await self.stub(vm).Info(messages.InfoRequest(), timeout=5.0)
        await self.ask("behave", id="a", behaviour="dies-after", after=0)
        await self.running("a", "ended")

    async def test_whoever_watches_is_told(self) -> None:
        watcher = await self.connect()
        await self.ask("watch", watcher)
        await self.boot("a", behaviour="dies-after", after=0.1)
        await self.running("a", "ended")
        await self.boot("b")
        await self.running("b")
        await self.ask("end", id="b")
        await self.ask("list", watcher)
        self.assertEqual(watcher.events, [("running", "a"), ("ended", "a"), ("running", "b")])

    async def test_vms_outlive_connections_and_end_with_the_farm(self) -> None:
        await self.boot("a", tags={"kept": True})
        await self.running("a")
        assert self.line.transport is not None
        self.line.transport.loseConnection()
        self.line = await self.connect()
        self.assertEqual((await self.ask("get", id="a"))["vm"]["state"], "running")
        self.kill()
        await self.start()
        vm = (await self.ask("get", id="a"))["vm"]
        self.assertEqual((vm["state"], vm["port"], vm["tags"]), ("ended", 0, {"kept": True}))
        self.assertIn("farm", vm["detail"])
        await self.ask("end", id="a")
        self.assertEqual((await self.ask("list"))["vms"], [])

    async def test_one_farm_at_a_time(self) -> None:
        other = subprocess.run(warm.command(*self.command()), cwd=ROOT, capture_output=True, text=True)
        self.assertEqual(other.returncode, 1)
        self.assertIn("another farm holds", other.stderr)
        self.assertTrue((await self.ask("list"))["ok"])

    async def test_it_stops_when_told(self) -> None:
        await self.boot("a")
        await self.running("a")
        self.assertTrue((await self.ask("stop"))["ok"])
        assert self.process is not None
        self.assertEqual(self.process.wait(), 0)

    async def test_the_socket_and_records_are_for_their_owner_alone(self) -> None:
        await self.boot("a")
        await self.running("a")
        for path in (self.directory / "socket", *(self.directory / "state").rglob("*.json")):
            self.assertEqual(path.stat().st_mode & 0o077, 0, path)

    async def test_wrong_words_are_refused_and_harm_nobody(self) -> None:
        identity = attrs.asdict(self.authority.identity("a"))
        for fields in (
            {"op": "fly"}, {"op": "boot"}, {"op": "boot", "id": "../x", "identity": identity},
            {"op": "boot", "id": "a", "identity": {}},
            {"op": "boot", "id": "a", "identity": identity, "delay": -1},
            {"op": "boot", "id": "a", "identity": identity, "behaviour": "odd"},
            {"op": "boot", "id": "a", "identity": identity, "tags": []},
            {"op": "boot", "id": "a", "identity": identity, "tags": {"x": "y" * 20000}},
            {"op": "get", "id": 5}, {"op": "end"},
        ):  # fmt: skip
            answer = await self.ask(**fields)  # type: ignore[arg-type]
            self.assertEqual((answer["ok"], answer["code"]), (False, "INVALID_ARGUMENT"), fields)
        self.assertEqual((await self.ask("get", id="none"))["code"], "NOT_FOUND")
        self.assertEqual((await self.ask("list"))["vms"], [])
        noisy = await self.connect()
        noisy.answers[None] = Deferred()
        refusal = noisy.answers[None]
        noisy.sendLine(b"no json")
        self.assertEqual((await refusal)["code"], "INVALID_ARGUMENT")
        noisy.answers[None] = Deferred()
        noisy.sendLine(os.urandom(150000).hex().encode())
        await noisy.gone
        self.assertTrue((await self.ask("list"))["ok"])
