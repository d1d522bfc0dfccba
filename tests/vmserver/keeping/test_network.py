# SPDX-License-Identifier: Apache-2.0
"""The network of a machine that is held, and of its clone, in a real kernel."""

from __future__ import annotations

import errno
import json
import secrets
import socket
import subprocess
from collections.abc import Callable
from typing import Any, TypeVar

from twisted.trial.unittest import TestCase

from infranetes_common.network_namespaces import thd_in_namespace
from infranetes_common.reactors import installed
from tests.harness.needs import needs_netns
from tests.support.pod_namespaces import Machine, ip
from vmserver.keeping import addresses, connections
from vmserver.keeping.silence import TABLE, Silence
from vmserver.network.pod_tunnel import DEVICE

reactor = installed()
T = TypeVar("T")

NODE, POD = "198.18.236.1", "198.18.236.2"
AGENT_PORT, APP_PORT = 2475, 8080
SOON, NOT = 10.0, 0.3


@needs_netns
class NetworkCase(TestCase):
    """A pod's network namespace, and the node's end of its card."""

    def setUp(self) -> None:
        outer = f"ik{secrets.token_hex(4)}"
        self.pod = Machine(outer, POD, NODE, "02:00:00:00:36:02")
        self.addCleanup(self.pod.end)
        ip("address", "add", f"{NODE}/24", "dev", outer)

    def inside(self, work: Callable[[], T]) -> T:
        return thd_in_namespace(self.pod.name, work)

    def made(self, kind: int = socket.SOCK_STREAM, family: int = socket.AF_INET) -> socket.socket:
        """Return a socket of the pod's."""
        found = self.inside(lambda: socket.socket(family, kind))
        self.addCleanup(found.close)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return found

    def listening(self, host: str = POD, port: int = APP_PORT, family: int = socket.AF_INET) -> socket.socket:
        found = self.made(family=family)
        found.bind((host, port))
        found.listen()
        return found

    def connected(
        self, listener: socket.socket, where: tuple[str, int]
    ) -> tuple[socket.socket, socket.socket]:
        """Connect from the node to what the pod listens on; return the pod's end and the node's."""
        caller = socket.create_connection(where, SOON)
        self.addCleanup(caller.close)
        answered, _ = listener.accept()
        self.addCleanup(answered.close)
        answered.settimeout(SOON)
        return answered, caller

    def talks(self, one: socket.socket, other: socket.socket, seconds: float = SOON) -> bool:
        other.settimeout(seconds)
        one.send(b"x")
        try:
            return other.recv(100) != b""
        except TimeoutError:
            return False


class SilenceTests(NetworkCase):
    """A machine that is held."""

    def silence(self) -> Silence:
        return Silence(reactor, self.pod.name)

    def answers(self, seconds: float) -> bool:
        """Return whether the pod's kernel refuses a connection to where nothing listens."""
        with socket.socket() as caller:
            caller.settimeout(seconds)
            return caller.connect_ex((POD, 9)) == errno.ECONNREFUSED

    async def test_it_is_silent_and_its_connections_outlast_that(self) -> None:
        pod, node = self.connected(self.listening(), (POD, APP_PORT))
        self.assertTrue(self.talks(node, pod) and self.talks(pod, node) and self.answers(SOON))
        for _ in range(2):
            await self.silence().begin(0)
        self.assertFalse(self.answers(NOT))
        self.assertFalse(self.talks(node, pod, NOT))
        self.assertFalse(self.talks(pod, node, NOT))
        for _ in range(2):
            await self.silence().end()
        for end in (pod, node):
            end.settimeout(SOON)
            self.assertEqual(end.recv(100), b"x")
        self.assertTrue(self.answers(SOON))

    async def test_it_answers_for_no_address(self) -> None:
        await self.silence().begin(0)
        ip("neigh", "flush", "to", POD)
        self.assertFalse(self.answers(NOT))
        known = subprocess.run(["ip", "neigh", "show", POD], capture_output=True, text=True, check=True)
        self.assertNotIn("lladdr", known.stdout)

    async def test_it_talks_to_itself(self) -> None:
        listener = self.listening("127.0.0.1")
        await self.silence().begin(0)
        caller = self.made()
        caller.settimeout(SOON)
        caller.connect(("127.0.0.1", APP_PORT))
        answered, _ = listener.accept()
        self.addCleanup(answered.close)
        self.assertTrue(self.talks(caller, answered))

    async def test_its_agents_port_is_reached_all_the_same(self) -> None:
        agent, app = self.listening(port=AGENT_PORT), self.listening()
        ends = self.connected(app, (POD, APP_PORT))
        await self.silence().begin(AGENT_PORT)
        self.assertTrue(self.talks(*self.connected(agent, (POD, AGENT_PORT))))
        self.assertFalse(self.talks(*ends, NOT))

    async def test_nothing_of_it_is_left(self) -> None:
        await self.silence().begin(0)
        await self.silence().end()
        listed = ["ip", "netns", "exec", self.pod.name, "nft", "list", "tables"]
        done = subprocess.run(listed, capture_output=True, text=True, check=True)
        self.assertNotIn(TABLE, done.stdout)


class ConnectionTests(NetworkCase):
    """The connections that a clone has from the pod that was kept."""

    def error_of(self, end: socket.socket) -> int:
        """Return with which error reading fails."""
        with self.assertRaises(OSError) as raised:
            end.recv(1)
        return raised.exception.errno or 0

    def test_the_kernel_can(self) -> None:
        self.inside(connections.thd_check)

    def test_they_end_at_once_and_what_listens_goes_on(self) -> None:
        listener = self.listening()
        accepted, _ = self.connected(listener, (POD, APP_PORT))
        server = socket.create_server((NODE, APP_PORT))
        self.addCleanup(server.close)
        made = self.made()
        made.settimeout(SOON)
        made.connect((NODE, APP_PORT))
        self.assertEqual(self.inside(connections.thd_end_all), 2)
        for end in (accepted, made):
            self.assertEqual(self.error_of(end), errno.ECONNABORTED)
        self.assertTrue(self.talks(*self.connected(listener, (POD, APP_PORT))))

    def test_those_of_ipv6_end_too(self) -> None:
        listener = self.listening("::", family=socket.AF_INET6)
        accepted, _ = self.connected(listener, (POD, APP_PORT))
        self.assertEqual(self.inside(connections.thd_end_all), 1)
        self.assertEqual(self.error_of(accepted), errno.ECONNABORTED)

    def test_one_that_is_being_made_fails(self) -> None:
        made = self.made()
        made.setblocking(False)
        self.assertEqual(made.connect_ex(("198.18.236.77", 80)), errno.EINPROGRESS)
        self.assertEqual(self.inside(connections.thd_end_all), 1)
        self.assertEqual(made.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR), errno.ECONNABORTED)

    def test_a_peer_of_datagrams_is_one_no_more(self) -> None:
        resolver = self.made(socket.SOCK_DGRAM)
        resolver.connect((NODE, 53))
        resolver.settimeout(SOON)
        self.assertEqual(self.inside(connections.thd_end_all), 1)
        self.assertEqual(self.error_of(resolver), errno.ECONNABORTED)

    def test_the_pods_own_go_on(self) -> None:
        for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
            listener = self.listening(host, family=family)
            caller = self.made(family=family)
            caller.connect((host, APP_PORT))
            answered, _ = listener.accept()
            self.addCleanup(answered.close)
            self.assertEqual(self.inside(connections.thd_end_all), 0)
            self.assertTrue(self.talks(caller, answered))

    async def test_the_peer_of_the_kept_pod_learns_nothing(self) -> None:
        pod, node = self.connected(self.listening(), (POD, APP_PORT))
        await Silence(reactor, self.pod.name).begin(0)
        self.inside(connections.thd_end_all)
        self.assertEqual(self.error_of(pod), errno.ECONNABORTED)
        node.settimeout(NOT)
        self.assertRaises(TimeoutError, node.recv, 1)  # which a reset would end


class AddressTests(NetworkCase):
    """The addresses that a clone has from the pod that was kept."""

    def shown(self, *words: str) -> Any:  # Any: JSON
        done = subprocess.run(
            ["ip", "-n", self.pod.name, "-j", *words], capture_output=True, text=True, check=True
        )
        return json.loads(done.stdout or "[]")

    def test_all_are_gone_and_it_stays_so(self) -> None:
        inner = ("-n", self.pod.name)
        ip(*inner, "address", "add", "198.18.99.2/32", "dev", "eth0")
        ip(*inner, "address", "add", "fd00:36::2/64", "dev", "eth0", "nodad")
        ip(*inner, "link", "add", DEVICE, "type", "veth", "peer", "name", "other")
        ip(*inner, "address", "add", "10.9.8.7/32", "dev", DEVICE)
        ip(*inner, "link", "set", DEVICE, "up")
        for _ in range(2):
            self.inside(addresses.thd_leave)
            found = {
                one["local"]: link["ifname"] for link in self.shown("address") for one in link["addr_info"]
            }
            self.assertEqual(set(found.values()), {"lo"}, found)
            self.assertEqual(self.shown("route"), [])
            links = {link["ifname"]: link for link in self.shown("link")}
            self.assertNotIn(DEVICE, links)
            self.assertNotIn("UP", links["eth0"]["flags"])
            self.assertIn("UP", links["lo"]["flags"])
