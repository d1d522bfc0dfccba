# SPDX-License-Identifier: Apache-2.0
"""The agent listens at its own port where the hypervisor gives it one, and at a TCP port elsewhere."""

from __future__ import annotations

import contextlib
import os
import tty
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import TCP4ClientEndpoint
from twisted.internet.interfaces import IAddress
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import deferLater
from twisted.trial.unittest import TestCase

from infranetes_common.errors import FailedPrecondition, InvalidArgument
from infranetes_common.identity import encode
from infranetes_common.reactors import installed
from infranetes_common.serial_link import RESET, Decoder, Opened, new_session, opening
from tests.support.waiting import until
from tests.vmserver.harness import SANDBOX, Agent, run_directory
from tests.vmserver.pki import Authority
from vmserver import config as configuration
from vmserver.config import IdentityConfig, LimitsConfig
from vmserver.daemon import Vmserver
from vmserver.identity import serial_listener
from vmserver.identity.listener import Listener

reactor = installed()


class Served(Factory):
    """Counts the connections, and does nothing with them."""

    noisy = False

    def __init__(self) -> None:
        self.connections = 0

    def buildProtocol(self, addr: IAddress | None) -> Protocol:
        self.connections += 1
        return Protocol()


class PortCase(TestCase):
    """A pty stands in for the port: both have a host's side."""

    def setUp(self) -> None:
        self.device = Path(self.mktemp()).absolute()
        self.host, guest = os.openpty()
        self.addCleanup(os.close, self.host)
        self.addCleanup(os.close, guest)
        tty.setraw(guest)
        os.set_blocking(self.host, False)
        self.name = os.ttyname(guest)
        self.identity = Authority().identity(SANDBOX)

    def give(self) -> None:
        """Give the machine its port."""
        self.device.symlink_to(self.name)

    async def answered(self) -> None:
        """Open a session from the host's side, and wait for the answer."""
        session, decoder, heard = new_session(), Decoder(), []
        os.write(self.host, opening(session))

        def answers() -> bool:
            with contextlib.suppress(BlockingIOError):
                heard.extend(decoder.events(os.read(self.host, 1 << 17)))
            return Opened(session) in heard

        await until(answers, "an answer")


class ListenerTests(PortCase):
    def setUp(self) -> None:
        super().setUp()
        self.guarded: list[object] = []
        self.served = Served()
        self.listener = Listener(reactor, "127.0.0.1:0", LimitsConfig(), self, device=self.device)  # type: ignore[arg-type]
        self.listener.inner = self.served
        self.addCleanup(self.listener.abort_connections)
        self.addCleanup(lambda: Deferred.fromCoroutine(self.listener.stop_listening()))

    async def shut(self, port: int, node: object) -> None:
        self.guarded.append(port)

    async def open(self) -> None:
        await self.listener.open(self.identity, self.listener.check(self.identity))

    async def test_by_its_port_it_has_no_other(self) -> None:
        self.give()
        self.assertEqual((self.listener.by_tls, self.listener.is_open), (False, False))
        for _ in range(2):
            await self.open()
        self.assertEqual((self.listener.by_tls, self.listener.is_open, self.listener.port), (False, True, 0))
        self.assertEqual((self.listener.factory, self.guarded), (None, []))
        await self.answered()
        self.assertEqual(self.served.connections, 1)

    async def test_without_a_port_it_listens_for_tls(self) -> None:
        self.assertTrue(self.listener.by_tls)
        await self.open()
        self.assertTrue(self.listener.port)
        self.give()
        self.assertTrue(self.listener.by_tls, "as the node was told")
        await self.open()
        self.assertTrue(self.listener.is_open)
        await self.listener.stop_listening()
        self.assertFalse(self.listener.is_open)

    async def test_its_certificate_is_not_read_but_has_to_look_like_one(self) -> None:
        self.give()
        unread = attrs.evolve(self.identity, certificate_pem="-----BEGIN CERTIFICATE-----\nwhatever")
        self.assertIsNone(self.listener.check(unread))
        for identity in (unread, attrs.evolve(self.identity, certificate_pem="nonsense")):
            if identity is not unread:
                self.assertRaises(InvalidArgument, self.listener.check, identity)
        await self.listener.renew(unread, None)

    async def test_a_port_that_can_not_be_opened_is_told(self) -> None:
        self.device.mkdir()
        with self.assertRaises(FailedPrecondition) as caught:
            await self.open()
        self.assertIn(str(self.device), str(caught.exception))
        self.assertFalse(self.listener.is_open)

    async def test_a_daemon_of_the_release_before_which_never_comes_by_the_port_can_call(self) -> None:
        self.patch(serial_listener, "LONELY_SECONDS", 0.1)
        self.give()
        await self.open()
        await self.answered()
        await deferLater(reactor, 0.3, lambda: None)
        self.assertIsNone(self.listener.factory, "the node is there")
        os.write(self.host, RESET)
        await until(lambda: self.listener.factory, "it listens")
        self.assertEqual((self.listener.port, self.listener.by_tls), (0, False), "it is called by its port")
        await self.open()
        await self.answered()
        assert self.listener._port is not None
        address = self.listener._port.getHost()
        seen = self.served.connections
        endpoint = TCP4ClientEndpoint(reactor, "127.0.0.1", address.port)  # type: ignore[attr-defined]
        connection: Any = await endpoint.connect(Factory.forProtocol(Protocol))
        await until(lambda: self.listener.factory and self.listener.factory.counts[1], "a handshake")
        connection.transport.loseConnection()
        self.assertEqual(self.served.connections, seen + 1)
        await until(lambda: self.listener.factory and not self.listener.factory.counts[1], "its end")

    async def test_its_end_lets_go_of_the_device(self) -> None:
        self.give()
        await self.open()
        await self.answered()
        await self.listener.stop_listening()
        self.listener.abort_connections()
        self.assertFalse(self.listener.is_open)
        self.assertEqual(self.opened(), 1, "the test's own")

    def opened(self) -> int:
        """Return how often this process has the port open."""
        count = 0
        for each in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):
                count += os.readlink(f"/proc/self/fd/{each}") == self.name
        return count


class DaemonTests(PortCase):
    """The whole agent."""

    def daemon(self, source: str) -> Vmserver:
        agent = Agent(reactor, run_directory(self))
        identity = attrs.evolve(agent.config.identity, source=source, agent_device=str(self.device))
        made = Vmserver(
            reactor,
            attrs.evolve(agent.config, identity=identity),
            provider=agent.make_provider(),
            sources=False,
        )
        self.addCleanup(made.stopService)
        made.startService()
        return made

    async def test_the_node_hears_that_it_is_called_by_the_port(self) -> None:
        self.give()
        daemon = self.daemon(configuration.VIRTIO_SERIAL)
        document = encode(self.identity)
        for _ in range(2):
            self.assertEqual(await daemon.accept(document), 0)
        await self.answered()

    async def test_a_machine_whose_identity_comes_another_way_is_called_by_tls(self) -> None:
        self.give()
        daemon = self.daemon(configuration.FILE)
        self.assertTrue(await daemon.accept(encode(self.identity)))

    def test_the_port_is_looked_for_where_udev_puts_it(self) -> None:
        self.assertEqual(IdentityConfig().agent_device, "/dev/virtio-ports/infranetes.agent")
