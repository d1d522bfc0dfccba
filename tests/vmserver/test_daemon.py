# SPDX-License-Identifier: Apache-2.0
"""`twistd vmserver` as a process: started, killed, started again; its errors when it can't start."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.task import deferLater
from twisted.trial.unittest import SynchronousTestCase, TestCase

from infranetes_common.errors import FailedPrecondition, InvalidArgument
from infranetes_common.identity import encode
from infranetes_common.reactors import installed
from infranetes_common.wire import cri
from infranetes_common.wire import vmserver as messages
from infranetes_common.wire.vmserver_rpcs import AgentStub
from tests.contract.container_provider_case import busybox_image
from tests.harness.needs import needs_programs
from tests.support import warm
from tests.support.dockerd import archive
from tests.support.waiting import until
from tests.vmserver.harness import SANDBOX, Agent, run_directory
from tests.vmserver.pki import Authority
from txgrpc import Code, GrpcError
from vmserver import daemon
from vmserver.config import Config
from vmserver.identity.delivery import save
from vmserver.identity.identity_file import IdentityFile
from vmserver.identity.virtio_serial import VirtioSerial
from vmserver.service import Options, makeService

reactor = installed()
ROOT = Path(__file__).resolve().parents[2]
VMSERVER = (*warm.TWISTD, "--nodaemon", "--pidfile=", "vmserver", "--config")
ID = "e0" * 16


class OptionsTests(SynchronousTestCase):
    """The command line and the file."""

    def parsed(self, text: str | None, *flags: str) -> Config:
        options = Options()
        arguments = list(flags)
        if text is not None:
            path = self.mktemp()
            Path(path).write_text(text)
            arguments += ["--config", path]
        options.parseOptions(arguments)
        return options.vmserver_config

    def refused(self, text: str, *words: str) -> None:
        with self.assertRaises(SystemExit) as caught:
            self.parsed(text)
        for word in words:
            self.assertIn(word, str(caught.exception))

    def test_everything_has_a_default(self) -> None:
        self.assertEqual(self.parsed(None), Config())
        self.assertEqual(self.parsed(""), Config())

    def test_flags_override_the_file(self) -> None:
        config = self.parsed(
            'provider = "docker"\nlisten = "1.2.3.4:5"\n', "--provider", "fake", "--run-dir", "/r"
        )
        self.assertEqual((config.provider, config.listen, config.run_dir), ("fake", "1.2.3.4:5", Path("/r")))

    def test_those_of_the_go_version(self) -> None:
        config = self.parsed(
            None, "--listen", "1.2.3.4:5", "--cert", "/c.pem", "--key", "/k.pem", "--contprovider", "fake"
        )
        self.assertEqual((config.listen, config.provider), ("1.2.3.4:5", "machine"))
        identity = config.identity
        self.assertEqual((identity.source, identity.cert, identity.key), ("certificate", "/c.pem", "/k.pem"))
        for flags, word in (
            (("--cert", "/c.pem"), "identity.key"),
            (("--key", "/k.pem"), "identity.cert"),
            (("--provider", "docker", "--contprovider", "fake"), "--contprovider"),
        ):
            with self.assertRaises(SystemExit) as caught:
                self.parsed(None, *flags)
            self.assertIn(word, str(caught.exception))

    def test_what_is_wrong_is_named(self) -> None:
        self.refused("nonsense = 1", "nonsense")
        self.refused("listen = 5", "listen")
        self.refused('listen = "nowhere"', "listen")
        self.refused('[identity]\nsource = "post"', "identity.source", "virtio-serial")
        self.refused("[limits]\nconnections = 0", "limits.connections")
        self.refused("[limits]\nhandshake_seconds = 0", "limits.handshake_seconds")

    def test_a_file_that_is_not_there(self) -> None:
        self.assertRaises(SystemExit, Options().parseOptions, ["--config", "/no/such/file"])

    def test_providers_that_can_not_be(self) -> None:
        for text, word in (
            (
                'provider = "nothing"',
                "{path}: provider: no ContainerProvider is called 'nothing'; known are docker",
            ),
            ('[providers.docker]\nsockets = "x"', "{path}: providers.docker.sockets: "),
        ):
            options = Options()
            path = self.mktemp()
            Path(path).write_text(text)
            options.parseOptions(["--config", path])
            with self.assertRaises(SystemExit) as caught:
                makeService(options)
            self.assertIn(word.replace("{path}", os.path.abspath(path)), str(caught.exception))


class WarmUpTests(TestCase):
    """Which machines are warmed up before they look for an identity."""

    async def warmed_up(self, source: str) -> list[str]:
        """Return what an agent does, in its order, that finds no identity."""
        done: list[str] = []

        async def prewarm(reactor: object, factory: object, provider: object, *, by_tls: bool) -> None:
            done.append("warmed up")

        self.patch(daemon, "prewarm", prewarm)
        self.patch(VirtioSerial, "start", lambda _: done.append("looks"))
        self.patch(IdentityFile, "start", lambda _: done.append("looks"))
        agent = Agent(reactor, run_directory(self))
        identity = attrs.evolve(agent.config.identity, source=source)
        service = daemon.Vmserver(
            reactor, attrs.evolve(agent.config, identity=identity), provider=agent.make_provider()
        )
        service.startService()
        assert service._starting is not None
        await service._starting
        await service.stopService()
        return done

    async def test_one_that_may_become_a_template_is(self) -> None:
        self.assertEqual(await self.warmed_up("virtio-serial"), ["warmed up", "looks"])

    async def test_one_that_a_pod_waits_for_is_not(self) -> None:
        self.assertEqual(await self.warmed_up("file"), ["looks"])


class ProcessTests(TestCase):
    """The daemon itself, with an identity from a file and the fake provider."""

    @classmethod
    def setUpClass(cls) -> None:
        warm.wait_until_ready()

    def setUp(self) -> None:
        self.directory = run_directory(self)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.config = self.directory / "vmserver.toml"
        self.config.write_text(
            f'provider = "fake"\nrun_dir = "{self.directory}/own"\nlisten = "127.0.0.1:{self.port}"\n'
            f'[identity]\nsource = "file"\npath = "{self.directory}/identity"\napply = false\n'
        )
        self.arguments = (*VMSERVER, str(self.config))
        self.node = Agent(reactor, self.directory)
        save(self.directory / "identity", encode(self.node.authority.identity(SANDBOX)).decode())
        self.process: warm.Process | None = None
        self.addCleanup(lambda: Deferred.fromCoroutine(self._clean_up()))

    async def _clean_up(self) -> None:
        for channel in self.node.channels:
            await channel.close()
        await self.kill()

    def start(self) -> None:
        with open(self.directory / "log", "ab") as log:
            self.process = warm.Process(self.arguments, log.fileno(), ROOT, os.environ)

    async def kill(self, number: int = signal.SIGKILL) -> int | None:
        process, self.process = self.process, None
        if process is None:
            return 0
        process.send_signal(number)
        await until(lambda: process.poll() is not None, "it ends")
        return process.returncode

    def stub(self) -> AgentStub:
        # The harness's own agent is not started: only its node is used.
        self.node.service = self  # type: ignore[assignment]
        return self.node.stub()

    async def info(self, stub: AgentStub) -> messages.InfoResponse:
        deadline = time.monotonic() + 100
        while True:
            try:
                return await stub.Info(messages.InfoRequest(), timeout=2.0)
            except GrpcError:
                if time.monotonic() > deadline:
                    self.fail((self.directory / "log").read_text())
                await deferLater(reactor, 0.1, lambda: None)

    @needs_programs("busybox")
    async def test_killing_the_agent_alone_loses_no_container_and_no_log_line(self) -> None:
        self.start()
        stub = self.stub()
        before = await self.info(stub)
        built = busybox_image()
        load = [
            messages.LoadImageRequest(header=messages.LoadImageHeader(image_id=built.id)),
            messages.LoadImageRequest(data=archive(built)[: 1 << 19]),
        ]
        with self.assertRaises(GrpcError):
            await stub.LoadImage(iter(load), timeout=20.0)
        data = archive(built)
        load[1:] = [
            messages.LoadImageRequest(data=data[at : at + 65536]) for at in range(0, len(data), 65536)
        ]
        await stub.LoadImage(iter(load), timeout=30.0)
        waits = "while [ ! -e {0} ]; do sleep 0.05; done"
        killed, written, back = (self.directory / name for name in ("killed", "written", "back"))
        script = (
            f"echo 1; echo 2; {waits.format(killed)}; echo 3; echo 4; touch {written}; "
            f"{waits.format(back)}; echo 5; echo 6"
        )
        config = cri.ContainerConfig(command=["sh", "-c", script])
        request = messages.CreateContainerRequest(id=ID, image_id=built.id, config=config)
        made = await stub.CreateContainer(request, timeout=10.0)
        started = await stub.StartContainer(messages.StartContainerRequest(id=ID), timeout=10.0)
        running = stub.ExecSync(messages.ExecSyncRequest(id=ID, command=["sleep", "20"]), timeout=30.0)
        await deferLater(reactor, 0.3, lambda: None)
        await self.kill()
        # A call that the agent died in.
        with self.assertRaises(GrpcError) as caught:
            await running
        self.assertEqual(caught.exception.code, Code.UNAVAILABLE)
        killed.touch()
        await until(written.exists, "the container goes on")
        (self.directory / "identity").unlink()  # the agent has kept what it needs
        self.start()
        after = await self.info(stub)
        self.assertEqual((after.sandbox_id, after.boot_id), (SANDBOX, before.boot_id))
        self.assertNotEqual(after.agent_id, before.agent_id)
        again = await stub.CreateContainer(request, timeout=10.0)
        self.assertEqual(again.state.created_at, made.state.created_at)
        self.assertEqual(again.state.pid, started.state.pid)
        lines = []
        async for record in stub.ReadLog(messages.ReadLogRequest(id=ID, follow=True), timeout=30.0):
            lines.append(record.line)
            if record.line == b"4":
                back.touch()
        self.assertEqual(lines, [b"1", b"2", b"3", b"4", b"5", b"6"])
        listed = await stub.ListContainers(messages.ListContainersRequest(), timeout=10.0)
        self.assertEqual(
            [(one.state, one.exit_code) for one in listed.containers], [(cri.CONTAINER_EXITED, 0)]
        )
        await stub.RemoveContainer(messages.RemoveContainerRequest(id=ID), timeout=10.0)

    async def hang_up(self, words: str) -> str:
        """Send SIGHUP; return the log since then, once it has `words`."""
        log = self.directory / "log"
        said = len(log.read_text())
        assert self.process is not None
        self.process.send_signal(signal.SIGHUP)

        def told() -> bool:
            self.assertIsNotNone(self.process)
            self.assertIsNone(self.process.poll(), log.read_text())
            return words in log.read_text()[said:]

        await until(told, words)
        return log.read_text()[said:]

    async def test_a_reload_puts_limits_in_force_and_says_what_needs_a_restart(self) -> None:
        self.start()
        stub = self.stub()
        before = await self.info(stub)
        good = self.config.read_text()
        self.config.write_text(good + "[limits]\nexecs = 0\n")
        said = await self.hang_up("everything stays as it was")
        self.assertIn(f"{self.config}: limits.execs: ", said)
        self.config.write_text(good + "[providers.fake]\nboats = 1\n")
        said = await self.hang_up("everything stays as it was")
        self.assertIn(f"{self.config}: providers.fake.boats: ", said)
        self.config.write_text(good.replace("127.0.0.1", "127.0.0.2") + "[limits]\nsessions = 1\nexecs = 1\n")
        for _ in range(2):
            said = await self.hang_up("was read again: ")
            self.assertEqual(said.count(f"{self.config}: listen has changed: "), 1, said)
        places = stub.Exec(timeout=30.0), stub.Exec(timeout=30.0)
        with self.assertRaises(GrpcError) as caught:
            await places[1].__anext__()
        self.assertEqual(caught.exception.code, Code.RESOURCE_EXHAUSTED)
        self.assertIn("1 sessions", caught.exception.message)
        places[0].cancel()
        self.config.write_text(good + "[limits]\nexecs = 1\n")
        self.assertIn("limits.sessions is in force", await self.hang_up("was read again: "))
        after = await self.info(stub)
        self.assertEqual((after.agent_id, after.boot_id), (before.agent_id, before.boot_id))
        request = messages.ExecSyncRequest(id=ID, command=["true"])
        with self.assertRaises(GrpcError) as caught:  # no such container, but the limit allows the call
            await stub.ExecSync(request, timeout=10.0)
        self.assertEqual(caught.exception.code, Code.NOT_FOUND)
        self.assertIn(await self.kill(signal.SIGTERM), (0, -signal.SIGTERM))

    async def test_it_ends_well_when_told_to(self) -> None:
        self.start()
        await self.info(self.stub())
        self.assertIn(await self.kill(signal.SIGTERM), (0, -signal.SIGTERM))  # by Twisted's release

    async def test_the_kept_identity_is_for_its_owner_alone(self) -> None:
        self.start()
        await self.info(self.stub())
        kept = self.directory / "own" / "identity.json"
        self.assertEqual(kept.stat().st_mode & 0o777, 0o600)
        self.assertEqual(kept.parent.stat().st_mode & 0o077, 0)
        self.assertNotIn(b"PRIVATE KEY", (self.directory / "log").read_bytes())

    def test_a_wrong_file_ends_the_start_with_words(self) -> None:
        self.config.write_text("nonsense = 1\n")
        done = subprocess.run(warm.command(*self.arguments), cwd=ROOT, capture_output=True, text=True)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("nonsense", done.stdout + done.stderr)
        self.assertNotIn("Traceback", done.stdout + done.stderr)


class AcceptTests(TestCase):
    """Which identities a machine takes on."""

    async def setUp(self) -> None:
        directory = run_directory(self)
        self.agent = Agent(reactor, directory)
        self.addCleanup(lambda: Deferred.fromCoroutine(self.agent.stop()))

    async def test_another_sandboxes_identity_is_refused(self) -> None:
        service = await self.agent.start()
        other = self.agent.authority.identity("6b" * 16)
        with self.assertRaises(FailedPrecondition) as caught:
            await service.accept(encode(other))
        self.assertIn(SANDBOX, str(caught.exception))

    async def test_the_same_again_is_answered_with_the_same_port(self) -> None:
        identity = self.agent.authority.identity(SANDBOX)
        service = await self.agent.start(identity)
        for _ in range(2):
            self.assertEqual(await service.accept(encode(identity)), service.port)

    async def test_what_is_no_identity_is_refused_and_a_good_one_taken_afterwards(self) -> None:
        with self.assertRaises(InvalidArgument):
            # Its certificate names another sandbox.
            await self.agent.start(attrs.evolve(Authority().identity("other"), sandbox_id=SANDBOX))
        service = self.agent.service
        assert service is not None
        self.assertEqual(service.port, 0)
        await service.accept(encode(self.agent.authority.identity(SANDBOX)))
        self.assertGreater(service.port, 0)

    async def test_a_port_in_use_is_named(self) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            with self.assertRaises(FailedPrecondition) as caught:
                await self.agent.start(self.agent.authority.identity(SANDBOX, listen=f"127.0.0.1:{port}"))
            self.assertIn(str(port), str(caught.exception))

    async def test_an_agent_that_starts_again_has_its_identity(self) -> None:
        service = await self.agent.start(self.agent.authority.identity(SANDBOX))
        boot_id = service._identity.boot_id
        await self.agent.stop()
        again = await self.agent.start()
        self.assertEqual((again._identity.boot_id, again._identity.sandbox_id), (boot_id, SANDBOX))

    async def test_a_kept_identity_that_is_damaged_is_waited_for_anew(self) -> None:
        kept = self.agent.config.run_dir / "identity.json"
        for content in (
            "",
            "{",
            '{"identity": 5}',
            '{"identity": "{}", "boot_id": "x"}',
            os.urandom(100).hex(),
        ):
            kept.write_text(content)
            await self.agent.start(self.agent.authority.identity(SANDBOX))
            await self.agent.stop()
