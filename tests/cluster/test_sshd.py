# SPDX-License-Identifier: Apache-2.0
"""The sshd and the systemctl of a cluster's node, with conch's client and a process of the test's own."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import attrs
from twisted.conch.endpoints import AuthenticationFailed, SSHCommandClientEndpoint
from twisted.conch.ssh.keys import Key
from twisted.internet import reactor
from twisted.internet.address import IPv4Address
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import TCP4ServerEndpoint
from twisted.internet.error import ConnectionDone, ProcessTerminated
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase, TestCase

from tests.cluster.components import SSH_USER
from tests.cluster.paths import Paths
from tests.cluster.sshd import Node, Server, make_commands, make_key
from tests.cluster.systemctl import Unit

HOST = b"127.0.0.1"


@attrs.define
class Said(Protocol):
    """Collects a command's output and exit code until it has ended."""

    ended: Deferred[tuple[int, bytes]]
    output: bytes = b""

    def dataReceived(self, data: bytes) -> None:
        self.output += data

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        code = 0
        if isinstance(reason.value, ProcessTerminated):
            code = reason.value.exitCode
        elif not reason.check(ConnectionDone):
            self.ended.errback(reason)
            return
        self.ended.callback((code, self.output))


class CommandTests(TestCase):
    async def setUp(self) -> None:
        self.directory = Path(self.mktemp())
        make_commands(self.directory / "commands", "no-such-cluster")
        self.key = make_key(self.directory / "ssh" / "key")
        host = make_key(self.directory / "ssh" / "host")
        server = Server(Node(reactor, self.directory / "commands"), host, self.key)
        port = await TCP4ServerEndpoint(reactor, 0, interface=HOST.decode()).listen(server)
        self.addCleanup(port.stopListening)
        address = port.getHost()
        assert isinstance(address, IPv4Address)
        self.port = address.port
        self.known = self.directory / "known_hosts"
        self.known.write_text(f"{HOST.decode()} {host.public().toString('OPENSSH').decode()}\n")

    async def run_by_ssh(self, command: str, key: Key) -> tuple[int, bytes]:
        endpoint = SSHCommandClientEndpoint.newConnection(
            reactor,
            command.encode(),
            SSH_USER.encode(),
            HOST,
            self.port,
            keys=[key],
            knownHosts=str(self.known),
        )
        ended: Deferred[tuple[int, bytes]] = Deferred()
        said = await endpoint.connect(Factory.forProtocol(lambda: Said(ended)))
        found = await ended
        said.transport.conn.transport.loseConnection()
        return found

    async def test_a_command_tells_its_output_and_code(self) -> None:
        self.assertEqual(await self.run_by_ssh("echo a b | tr a c; exit 3", self.key), (3, b"c b\n"))

    async def test_there_is_no_sudo(self) -> None:
        self.assertEqual(
            await self.run_by_ssh("sudo --version 2>&1", self.key), (127, b"sudo: command not found\n")
        )

    async def test_systemctl_is_ours(self) -> None:
        code, said = await self.run_by_ssh("systemctl mask kubelet 2>&1", self.key)
        self.assertEqual((code, said), (1, b"this systemctl stops, starts and shows, not: mask kubelet\n"))

    async def test_who_has_another_key_may_nothing(self) -> None:
        with self.assertRaises(AuthenticationFailed):
            await self.run_by_ssh("true", make_key(self.directory / "other"))

    def test_nobody_else_may_read_the_key(self) -> None:
        self.assertEqual((self.directory / "ssh" / "key").stat().st_mode & 0o777, 0o600)


@attrs.frozen
class _Place(Paths):
    """The paths of a cluster whose files are in a directory of the test's."""

    directory: Path = Path()

    @property
    def place(self) -> Path:
        return self.directory


class UnitTests(SynchronousTestCase):
    """A unit's start and stop, with `sleep` in the role of kubelet and the test in that of the supervisor."""

    def setUp(self) -> None:
        self.paths = _Place("test", Path(self.mktemp()))
        self.paths.place.mkdir()
        self.unit = Unit(self.paths, "kubelet")
        self.process = self.spawned()

    def spawned(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(["sleep", "600"])
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        self.paths.pid("kubelet").write_text(str(process.pid))
        return process

    def test_what_is_stopped_has_ended_and_stays_so(self) -> None:
        self.assertTrue(self.unit.active)
        self.unit.stop()
        self.unit.stop()
        self.assertFalse(self.unit.active)
        self.assertTrue(self.paths.stopped("kubelet").exists())
        self.assertEqual(self.process.wait(), -signal.SIGTERM)

    def test_what_is_started_may_be_started_again_and_runs(self) -> None:
        self.unit.stop()
        self.spawned()  # the supervisor's part
        self.unit.start()
        self.unit.start()
        self.assertFalse(self.paths.stopped("kubelet").exists())
        self.assertTrue(self.unit.active)

    def test_what_is_killed_is_not_active(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        deadline = time.monotonic() + 30
        while self.unit.active and time.monotonic() < deadline:
            os.sched_yield()
        self.assertFalse(self.unit.active)
