# SPDX-License-Identifier: Apache-2.0
"""Docker in particular: isolation, limits, and an engine that is down, blocked or full."""

from __future__ import annotations

import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.endpoints import UNIXServerEndpoint
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import deferLater
from twisted.trial.unittest import SynchronousTestCase, TestCase

from infranetes_common.errors import InvalidArgument, ResourceExhausted, Unavailable
from infranetes_common.reactors import installed
from infranetes_common.wire import cri
from tests.contract.container_provider_case import pieces
from tests.harness.needs import needs_docker, needs_mounts
from tests.support.dockerd import Dockerd, archive
from tests.support.oci import busybox
from tests.vmserver.containers.test_docker import DockerCase
from vmserver.containers.docker.bodies import StreamBody
from vmserver.containers.docker.engine import Engine
from vmserver.containers.docker.execs import CapturedOutput
from vmserver.containers.docker.kernel import KernelLog
from vmserver.containers.docker.names import NAME_PREFIX
from vmserver.containers.docker.provider import DockerConfig, DockerProvider

reactor = installed()


@needs_docker
class IsolationTests(DockerCase, TestCase):
    """What a container sees, according to its own output."""

    async def output(self, script: str, **fields: Any) -> str:
        """Return the output of a container that runs `script`."""
        id = await self.run_container("sh", "-c", script, **fields)
        await self.ended(id)
        return "\n".join(record.line.decode() for record in await self.lines(id))

    def secured(self, **fields: Any) -> Any:
        """Return a LinuxContainerConfig with these fields of the security context."""
        return cri.LinuxContainerConfig(security_context=cri.LinuxContainerSecurityContext(**fields))

    async def test_it_has_the_machines_network_and_name(self) -> None:
        self.assertEqual(
            await self.output("hostname; readlink /proc/self/ns/net"),
            f"{os.uname().nodename}\n{os.readlink('/proc/self/ns/net')}",
        )

    async def test_it_has_the_sandboxes_hosts_name_and_dns(self) -> None:
        (self.etc / "hosts").write_text("10.1.2.3\tpod\n")
        (self.etc / "hostname").write_text("pod\n")
        (self.etc / "resolv.conf").write_text("nameserver 10.96.0.10\n")
        self.assertEqual(
            await self.output("cat /etc/hosts /etc/hostname /etc/resolv.conf"),
            "10.1.2.3\tpod\npod\nnameserver 10.96.0.10",
        )

    async def test_user_and_groups_are_the_configured_ones_and_reported(self) -> None:
        linux = self.secured(
            run_as_user=cri.Int64Value(value=1000), run_as_group=cri.Int64Value(value=3000),
            supplemental_groups=[4000],
        )  # fmt: skip
        id = await self.run_container("sh", "-c", "id -u; id -g; id -G; sleep 600", linux=linux)
        user = (await self.state(id)).user.linux
        self.assertEqual((user.uid, user.gid), (1000, 3000))
        self.assertIn(4000, user.supplemental_groups)

        async def three() -> bool:
            return len(await self.lines(id)) == 3

        await self.until(three, "it has written")
        lines = [record.line for record in await self.lines(id)]
        self.assertEqual(lines[:2], [b"1000", b"3000"])
        self.assertIn(b"4000", lines[2].split())

    async def test_a_read_only_root_and_dropped_capabilities(self) -> None:
        linux = self.secured(
            readonly_rootfs=True, no_new_privs=True, capabilities=cri.Capability(drop_capabilities=["ALL"])
        )
        script = "touch /x 2>&1 | grep -c Read-only; grep -E 'CapEff|NoNewPrivs' /proc/self/status"
        self.assertEqual(
            await self.output(script, linux=linux), "1\nCapEff:\t0000000000000000\nNoNewPrivs:\t1"
        )

    async def test_paths_of_the_machine_are_mounted(self) -> None:
        (self.etc / "shared").mkdir()
        (self.etc / "shared" / "file").write_text("from the machine")
        mount = cri.Mount(container_path="/mnt/in", host_path=str(self.etc / "shared"), readonly=True)
        script = "cat /mnt/in/file; echo; touch /mnt/in/x 2>/dev/null || echo read-only"
        self.assertEqual(await self.output(script, mounts=[mount]), "from the machine\nread-only")

    async def test_a_path_that_only_the_node_has_is_named(self) -> None:
        config = cri.ContainerConfig(mounts=[cri.Mount(container_path="/x", host_path="/var/lib/kubelet/p")])
        making = self.provider.create("a" * 32, self.image_id, config, cri.PodSandboxConfig())
        self.assertIn("/var/lib/kubelet/p", await self.refused(InvalidArgument, making))
        self.assertEqual(await self.provider.containers(), [])

    async def test_one_that_exceeds_its_memory_is_killed_with_that_reason(self) -> None:
        limits = cri.LinuxContainerResources(memory_limit_in_bytes=16 << 20)
        id = await self.run_container(
            "sh", "-c", "tail /dev/zero", linux=cri.LinuxContainerConfig(resources=limits)
        )
        state = await self.ended(id)
        self.assertEqual((state.exit_code, state.reason), (137, "OOMKilled"))
        engine = Engine(reactor, self._engine.socket)
        self.addCleanup(engine.close)
        found = await engine.call("GET", f"/containers/{NAME_PREFIX}{id}/json")
        found["State"]["OOMKilled"] = False  # Docker has this if it learns of the end first
        kernel = KernelLog(reactor)
        self.addCleanup(kernel.close)
        self.assertTrue((await kernel.corrected(found))["State"]["OOMKilled"])

    async def test_limits_are_the_kernels(self) -> None:
        limits = cri.LinuxContainerResources(memory_limit_in_bytes=32 << 20)
        id = await self.run_container("sleep", "600", linux=cri.LinuxContainerConfig(resources=limits))
        await self.provider.update(id, cri.LinuxContainerResources(memory_limit_in_bytes=48 << 20))
        pid = (await self.state(id)).pid
        groups = dict(line.split(":", 2)[1:] for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines())
        root = Path("/sys/fs/cgroup")
        file = (
            root / "memory" / groups["memory"].lstrip("/") / "memory.limit_in_bytes"
            if "memory" in groups
            else root / groups[""].lstrip("/") / "memory.max"
        )
        self.assertEqual(int(file.read_text()), 48 << 20)

    async def test_the_image_decides_where_the_config_is_silent(self) -> None:
        built = busybox({"Entrypoint": ["echo", "entry"], "Cmd": ["cmd"], "User": "app"})
        await self.provider.load_image(built.id, pieces(archive(built)))
        self.image_id = built.id
        for args, expected in (([], "entry cmd"), (["other"], "entry other")):
            id = await self.create(args=args)
            await self.provider.start_container(id)
            await self.ended(id)
            self.assertEqual([record.line.decode() for record in await self.lines(id)], [expected])

    async def test_an_image_with_names_is_removed_whole(self) -> None:
        built = busybox(extra={"etc/named": b"1"})
        names = ["example.test/a:1", "example.test/b:2"]
        await self.provider.load_image(built.id, pieces(archive(built, tags=names)))
        await self.provider.remove_image(built.id)
        self.assertNotIn(built.id, await self.provider.images())

    async def test_containers_that_are_not_ours_are_left_alone(self) -> None:
        engine: Engine = self.provider._engine
        made = await engine.call("POST", "/containers/create", {"name": "foreign"}, {"Image": self.image_id})
        try:
            self.assertEqual(await self.provider.containers(), [])
            await (await self.restarted()).remove("foreign")
            await self.provider._engine.call("GET", f"/containers/{made['Id']}/json")
        finally:
            await self.provider._engine.call("DELETE", f"/containers/{made['Id']}", {"force": "1"})


@needs_docker
class DownTests(DockerCase, TestCase):
    """An engine that is stopped and started."""

    def engine(self) -> Dockerd:
        return Dockerd().start()

    async def tearDown(self) -> None:
        # trial runs cleanups before tearDown
        try:
            await super().tearDown()
        finally:
            self._engine.stop()

    async def test_calls_say_what_to_do_and_succeed_once_it_is_back(self) -> None:
        id = await self.run_container("sh", "-c", "echo here; sleep 600")
        await self.until(lambda: self.lines(id), "it has written")
        self._engine.stop_engine(9)
        await self.until(lambda: not self.provider._index.live, "the loss is seen")
        for work in (
            self.provider.containers(),
            self.provider.start_container(id),
            self.provider.exec_sync(id, ["true"], 5.0, 100),
            self.provider.images(),
            self.provider.remove(id),
            self.provider.load_image("sha256:" + "0" * 64, pieces(b"x")),
            self.make_provider().start(),
        ):
            words = await self.refused(Unavailable, work)
            self.assertIn("service docker", words)
        # Its log can still be read.
        self.assertEqual([record.line for record in await self.lines(id)], [b"here"])
        self._engine.start()
        await self.until(lambda: self.provider._index.live, "the provider is back", 60)
        self.assertEqual([state.id for state in await self.provider.containers()], [id])
        state = await self.ended(id)  # without live-restore it died with the engine
        self.assertNotEqual(state.exit_code, 0)
        self.assertEqual(self.states_told(id)[-1], cri.CONTAINER_EXITED)

    async def test_an_engine_that_ends_in_the_middle_of_a_call(self) -> None:
        id = await self.run_container("sleep", "600")
        running = self.provider.exec_sync(id, ["sleep", "600"], 0.0, 100)
        stopping = self.provider.stop_container(id, 600)
        for each in (running, stopping):
            each.addErrback(lambda failure: failure.value)
        await self.until(lambda: self._engine.serves(), "it serves")
        self._engine.stop_engine(9)
        for each in (running, stopping):
            self.assertIsInstance(await each, Unavailable)
        self._engine.start()
        await self.until(lambda: self.provider._index.live, "the provider is back", 60)


@needs_mounts
class FullTests(TestCase):
    """An engine whose disk is full."""

    async def test_a_full_disk_is_reported_and_nothing_of_the_image_remains(self) -> None:
        engine = Dockerd()
        self.addCleanup(engine.stop)
        data = engine.root / "data"
        data.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(data)], check=True)
        engine.start()
        provider = DockerProvider(
            reactor, DockerConfig(socket=engine.socket), Path("/nowhere"), Path("/nowhere")
        )
        self.addCleanup(provider.stop)
        await provider.start()
        built = busybox(extra={"big": os.urandom(30 << 20)})
        for _ in range(2):
            with self.assertRaises(ResourceExhausted) as caught:
                await provider.load_image(built.id, pieces(archive(built)))
            self.assertIn("disk is full", str(caught.exception))
            self.assertEqual(await provider.images(), [])
        small = busybox(extra={"small": b"1"})
        await provider.load_image(small.id, pieces(archive(small)))
        self.assertEqual(await provider.images(), [small.id])


class _Mute(Protocol):
    """Accepts requests and never answers."""


class _Halting(Protocol):
    """Begins an answer and does not go on."""

    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n[1"

    def dataReceived(self, data: bytes) -> None:
        assert self.transport is not None
        self.transport.write(self.answer)


class _Chunked(_Halting):
    """The same without a length."""

    answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n[1\r\n"


class _Hasty(Protocol):
    """Closes the connection with the first bytes of a request."""

    def dataReceived(self, data: bytes) -> None:
        assert self.transport is not None
        self.transport.loseConnection()


class _Refusing(Protocol):
    """Answers with the first bytes of a request, in two parts, and closes the connection."""

    header = b"HTTP/1.1 200 OK\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    body = b'14\r\n{"error": "no room"}\r\n0\r\n\r\n'

    def connectionMade(self) -> None:
        self._asked = False

    def dataReceived(self, data: bytes) -> None:
        assert self.transport is not None
        if not self._asked:
            self._asked = True
            self.transport.write(self.header)
            reactor.callLater(0.1, self._end)

    def _end(self) -> None:
        assert self.transport is not None
        self.transport.write(self.body)
        self.transport.loseConnection()


class BlockedTests(TestCase):
    """An engine that accepts connections and does not answer, or does not exist."""

    async def test_a_blocked_engine_is_given_up_by_the_deadline(self) -> None:
        short = Path("/tmp") / f"mute-{os.getpid()}.sock"
        port = await UNIXServerEndpoint(reactor, str(short)).listen(Factory.forProtocol(_Mute))
        self.addCleanup(port.stopListening)
        engine = Engine(reactor, short)
        for attempt in (
            engine.call("GET", "/info", within=0.2),
            engine.stream("GET", "/events", within=0.2),
        ):
            with self.assertRaises(Unavailable) as caught:
                await attempt
            self.assertIn("did not answer", str(caught.exception))
            self.assertIn("service docker", str(caught.exception))
        await engine.close()
        self.assertEqual(engine._pending, set())
        with self.assertRaises(Unavailable) as late:
            await engine.call("GET", "/info")
        self.assertIn("the agent is stopping", str(late.exception))

    async def test_a_cancelled_call_is_cancelled(self) -> None:
        short = Path("/tmp") / f"mute-{os.getpid()}.sock"
        port = await UNIXServerEndpoint(reactor, str(short)).listen(Factory.forProtocol(_Mute))
        self.addCleanup(port.stopListening)
        engine = Engine(reactor, short)
        for seconds in (None, 0.1):  # while it connects, and while it waits for the answer
            calling = Deferred.fromCoroutine(engine.call("GET", "/info"))
            if seconds is None:
                calling.cancel()
            else:
                reactor.callLater(seconds, calling.cancel)
            with self.assertRaises(CancelledError):
                await calling
        await engine.close()

    async def test_one_that_ends_while_it_is_sent_an_image_is_unavailable_and_a_cancelled_upload_is_cancelled(
        self,
    ) -> None:
        async def endless() -> AsyncIterator[bytes]:
            yield b"an image"
            await Deferred()

        for kind, seconds, expected in ((_Hasty, 20.0, Unavailable), (_Mute, 0.2, CancelledError)):
            short = Path("/tmp") / f"{kind.__name__}-{os.getpid()}.sock"
            port = await UNIXServerEndpoint(reactor, str(short)).listen(Factory.forProtocol(kind))
            self.addCleanup(port.stopListening)
            engine = Engine(reactor, short)
            sending = Deferred.fromCoroutine(
                engine.stream("POST", "/images/load", body=StreamBody(endless()))
            )
            late = reactor.callLater(seconds, sending.cancel)
            with self.assertRaises(expected) as caught:
                await sending
            if late.active():
                late.cancel()
                self.assertIn("Connection was closed", str(caught.exception))
            await engine.close()

    async def test_what_it_says_of_an_image_before_it_has_all_of_it_is_heard(self) -> None:
        async def endless() -> AsyncIterator[bytes]:
            while True:
                yield b"an image" * 1000
                await deferLater(reactor, 0.01)

        short = Path("/tmp") / f"refusing-{os.getpid()}.sock"
        port = await UNIXServerEndpoint(reactor, str(short)).listen(Factory.forProtocol(_Refusing))
        self.addCleanup(port.stopListening)
        engine = Engine(reactor, short)
        stream = await engine.stream("POST", "/images/load", body=StreamBody(endless()))
        self.assertEqual(await stream.read(), _Refusing.body.splitlines()[1])
        self.assertEqual(await stream.read(), b"")
        await engine.close()

    async def test_an_answer_that_does_not_go_on_is_given_up_without_a_word(self) -> None:
        """Whatever still comes of it: nothing is logged, which would fail this test."""
        for number, kind in enumerate((_Halting, _Chunked)):
            short = Path("/tmp") / f"halting-{os.getpid()}-{number}.sock"
            port = await UNIXServerEndpoint(reactor, str(short)).listen(Factory.forProtocol(kind))
            self.addCleanup(port.stopListening)
            engine = Engine(reactor, short)
            with self.assertRaises(Unavailable) as caught:
                await engine.call("GET", "/info", within=0.3)
            self.assertIn("did not answer", str(caught.exception))
            await engine.close()

    async def test_an_engine_that_does_not_exist(self) -> None:
        provider = DockerProvider(
            reactor, DockerConfig(socket=Path("/no/such.sock")), Path("/nowhere"), Path("/nowhere")
        )
        for _ in range(2):
            with self.assertRaises(Unavailable) as caught:
                await provider.start()
            self.assertIn("/no/such.sock", str(caught.exception))
        await provider.stop()
        await provider.stop()


class CapturedOutputTests(SynchronousTestCase):
    """Docker's multiplexed stream."""

    def frame(self, kind: int, data: bytes) -> bytes:
        """Return one frame."""
        return bytes([kind, 0, 0, 0]) + len(data).to_bytes(4, "big") + data

    def test_however_it_is_cut(self) -> None:
        stream = self.frame(1, b"one") + self.frame(2, b"two") + self.frame(1, b"") + self.frame(1, b"three")
        for size in range(1, len(stream) + 1):
            output = CapturedOutput(100)
            for at in range(0, len(stream), size):
                output.feed(stream[at : at + size])
            self.assertEqual((bytes(output.stdout), bytes(output.stderr)), (b"onethree", b"two"))

    def test_each_stream_has_its_bound(self) -> None:
        output = CapturedOutput(4)
        output.feed(
            self.frame(1, b"123456") + self.frame(2, b"ab") + self.frame(1, b"7") + self.frame(2, b"cde")
        )
        self.assertEqual((bytes(output.stdout), bytes(output.stderr)), (b"1234", b"abcd"))
