# SPDX-License-Identifier: Apache-2.0
"""Probes by connections in this machine's kernel: a pod is a network namespace with a veth to the node."""

from __future__ import annotations

import os
import re
import secrets
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import attrs
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from infranetes.pods.node.inventory import Sandbox
from infranetes.pods.sleeping import connection_probes
from infranetes.pods.sleeping.connection_probes import ConnectionProbes
from infranetes.pods.sleeping.probe_table import ANSWERED_SECONDS, ProbeTable
from infranetes.pods.store.records import SandboxRecord
from infranetes.pods.store.states import SandboxState
from infranetes_common.errors import Unavailable
from infranetes_common.reactors import installed
from tests.harness.needs import needs_netns
from tests.infranetes.pods.fakes import lone_sandbox
from tests.support.waiting import until

reactor = installed()

NODE, POD = "10.123.46.1", "10.123.46.2"
# An HTTP server that counts requests, a server that speaks first, and an echo; tells of each connection.
_SERVER = """
import contextlib, socket, sys, threading

def http(c):
    head = c.recv(65536)
    status = "500 Bad" if b"/bad" in head else "204 Well"
    c.sendall(f"HTTP/1.1 {status}\\r\\nContent-Length: 0\\r\\nConnection: close\\r\\n\\r\\n".encode())

def first(c):
    c.sendall(b"hello\\n")

def echo(c):
    while data := c.recv(65536):
        c.sendall(data)

def serve(port, talk):
    listening = socket.create_server(("0.0.0.0", port))
    while True:
        c, peer = listening.accept()
        print(port, flush=True)
        threading.Thread(target=talk_and_close, args=(talk, c), daemon=True).start()

def talk_and_close(talk, c):
    with c, contextlib.suppress(ConnectionError):
        talk(c)

for port, talk in ((80, http), (25, first), (7, echo)):
    threading.Thread(target=serve, args=(port, talk), daemon=True).start()
print("ready", flush=True)
sys.stdin.read()
"""

_DATAGRAM = "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('10.123.47.9', 9))"


def _request(path: str = "/", agent: str = "kube-probe/1.36") -> bytes:
    return (
        f"GET {path} HTTP/1.1\r\nHost: {POD}:80\r\nUser-Agent: {agent}\r\nAccept: */*\r\n"
        "Connection: close\r\n\r\n"
    ).encode()


def _thd_talk(port: int, *said: bytes, seconds: float = 20.0) -> bytes:
    """Connect to the pod, say something, and return the first bytes of the answer."""
    with socket.create_connection((POD, port), seconds) as connection:
        for each in said:
            connection.sendall(each)
            time.sleep(0.02)
        return connection.recv(65536)


def _thd_touch(port: int) -> bool:
    """Connect to the pod as a probe by TCP does. Return whether it is open."""
    try:
        with socket.create_connection((POD, port), 5.0):
            return True
    except ConnectionRefusedError:
        return False


def _thd_echoed(data: bytes) -> bytes:
    """Send all to the pod while reading what comes back."""
    with socket.create_connection((POD, 7), 20.0) as connection:
        sending = threading.Thread(target=connection.sendall, args=(data,))
        sending.start()
        echoed = bytearray()
        while len(echoed) < len(data):
            echoed += connection.recv(1 << 16)
        sending.join()
    return bytes(echoed)


class InNetworkCase(TestCase):
    """A pod at the end of a veth, in a network of this test's own."""

    async def setUp(self) -> None:
        name = f"probe{secrets.token_hex(3)}"
        self.log: list[str] = []
        for command in (
            f"ip netns add {name}",
            f"ip link add {name} type veth peer name eth0 netns {name}",
            f"ip address add {NODE}/24 dev {name}",
            f"ip link set {name} up",
            f"ip -n {name} address add {POD}/24 dev eth0",
            f"ip -n {name} link set lo up",
            f"ip -n {name} link set eth0 up",
            f"ip -n {name} route add default via {NODE}",
        ):
            subprocess.run(command.split(), check=True)
        self.addCleanup(subprocess.run, ["ip", "netns", "delete", name], check=True)
        self.addCleanup(subprocess.run, ["ip", "link", "delete", name], check=False)
        self.namespace = name
        self.server = subprocess.Popen(
            ["ip", "netns", "exec", name, sys.executable, "-c", _SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.server.stdout is not None and self.server.stdin is not None
        self.addCleanup(self.server.wait)
        self.addCleanup(self.server.stdin.close)
        self.addCleanup(self.server.stdout.close)
        self.addCleanup(self.server.kill)
        self.assertEqual(self.server.stdout.readline(), "ready\n")
        os.set_blocking(self.server.stdout.fileno(), False)
        self.table = ProbeTable(reactor, f"infranetes_{name}")
        self.seconds = 600.0
        self.woken: list[str] = []
        self.wake_error: Exception | None = None
        self.sandbox = _sandbox(POD)
        self.probes = self.make_probes()
        self.addCleanup(lambda: self.probes.stop())

    def make_probes(self) -> ConnectionProbes:
        return ConnectionProbes(reactor, self.table, lambda sandbox: self.seconds, self.awake)

    async def awake(self, id: str) -> None:
        self.woken.append(id)
        if self.wake_error is not None:
            raise self.wake_error
        await self.probes.awakes(self.sandbox)

    def connections(self) -> list[int]:
        """Return the ports of the connections that the pod has had since the last call."""
        assert self.server.stdout is not None
        return [int(line) for line in iter(self.server.stdout.readline, "")]

    async def fall_asleep(self) -> None:
        await self.probes.falls_asleep(self.sandbox)
        await self.probes.sleeps(self.sandbox)
        self.connections()
        self.woken.clear()

    async def talk(self, port: int, *said: bytes) -> bytes:
        return await deferToThread(_thd_talk, port, *said)

    def tables(self) -> list[str]:
        listed = subprocess.run(["nft", "list", "tables"], check=True, capture_output=True, text=True).stdout
        return [line for line in listed.splitlines() if self.namespace in line]


@needs_netns
class ConnectionProbesTests(InNetworkCase):
    async def test_a_probe_by_http_is_answered_as_the_pod_has_answered_it(self) -> None:
        await self.probes.answered(self.sandbox)
        self.assertIn(b"204", await self.talk(80, _request()))
        await self.fall_asleep()
        self.assertIn(b" 204 Well", await self.talk(80, _request()))  # it was not asked here before
        self.assertEqual((self.woken, self.connections()), ([self.sandbox.id], [80]))
        await self.fall_asleep()
        for _ in range(3):
            self.assertIn(b" 204 Repeated", await self.talk(80, _request()))
        self.assertEqual((self.woken, self.connections()), ([], []))

    async def test_a_request_may_come_in_pieces(self) -> None:
        await self.probes.answered(self.sandbox)
        await self.talk(80, _request())
        await self.fall_asleep()
        await self.talk(80, _request())
        await self.fall_asleep()
        request = _request()
        self.assertIn(
            b"Repeated", await self.talk(80, request[:2], request[2:30], request[30:-1], request[-1:])
        )

    async def test_other_requests_wake_the_pod(self) -> None:
        await self.probes.answered(self.sandbox)
        await self.talk(80, _request())
        await self.fall_asleep()
        await self.talk(80, _request())
        for other in (
            _request("/other"),
            _request(agent="curl/8"),
            b"POST / HTTP/1.1\r\n\r\n",
            b"\x16\x03\x01",
        ):
            await self.fall_asleep()
            self.assertIn(b" 204 Well", await self.talk(80, other))
            self.assertEqual((self.woken, self.connections()), ([self.sandbox.id], [80]))

    async def test_requests_of_other_programs_are_never_repeated(self) -> None:
        await self.probes.answered(self.sandbox)
        await deferToThread(_thd_touch, 80)
        for _ in range(2):
            await self.fall_asleep()
            self.assertIn(b" 204 Well", await self.talk(80, _request(agent="curl/8")))
            self.assertEqual((self.woken, self.connections()), ([self.sandbox.id], [80]))

    def expires(self) -> float:
        """Return the seconds for which a port's connections are still taken."""
        command = ["nft", "-j", "list", "set", "ip", f"infranetes_{self.namespace}", "answered"]
        listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return min(float(each) for each in re.findall(r'"expires": ([0-9.]+)', listed))

    async def test_connections_are_taken_for_as_long_as_the_pod_sleeps(self) -> None:
        await self.probes.answered(self.sandbox)
        await deferToThread(_thd_touch, 25)
        await self.fall_asleep()
        await until(lambda: self.expires() < ANSWERED_SECONDS - 1, "time passes")
        await self.probes._answer_all()
        self.assertGreaterEqual(self.expires(), ANSWERED_SECONDS - 1)

    async def test_an_answer_is_repeated_for_its_time(self) -> None:
        await self.probes.answered(self.sandbox)
        await self.talk(80, _request())
        await self.fall_asleep()
        await self.talk(80, _request())
        await self.fall_asleep()
        self.seconds = 0.001
        self.assertIn(b" 204 Well", await self.talk(80, _request()))
        self.assertEqual(self.woken, [self.sandbox.id])

    async def test_a_bad_answer_is_not_repeated(self) -> None:
        await self.probes.answered(self.sandbox)
        await self.talk(80, _request("/bad"))
        for _ in range(2):
            await self.fall_asleep()
            self.assertIn(b" 500 Bad", await self.talk(80, _request("/bad")))
            self.assertEqual(self.woken, [self.sandbox.id])

    async def test_a_probe_by_tcp_finds_the_ports_open_that_were_open(self) -> None:
        await self.probes.answered(self.sandbox)
        for port in (25, 81):
            await deferToThread(_thd_touch, port)
        await self.fall_asleep()
        for _ in range(3):
            self.assertTrue(await deferToThread(_thd_touch, 25))
        await until(lambda: not self.probes._stand_in.callers, "they are gone")
        self.assertEqual((self.woken, self.connections()), ([], []))
        self.assertFalse(await deferToThread(_thd_touch, 81), "what was closed reaches the pod itself")
        self.assertTrue(await deferToThread(_thd_touch, 7), "what nobody asked for before does, too")
        await until(lambda: 7 in self.connections(), "the pod was called")

    async def test_the_agents_port_is_left_alone(self) -> None:
        self.sandbox.record = attrs.evolve(self.sandbox.record, agent_port=7)
        await self.probes.answered(self.sandbox)
        await deferToThread(_thd_touch, 7)
        await self.fall_asleep()
        await deferToThread(_thd_touch, 7)
        await until(lambda: 7 in self.connections(), "the pod was called")

    async def test_a_pod_that_speaks_first_is_woken_to_speak(self) -> None:
        await self.probes.answered(self.sandbox)
        await deferToThread(_thd_touch, 25)
        await self.fall_asleep()
        self.assertEqual(await self.talk(25), b"hello\n")
        self.assertEqual(self.woken, [self.sandbox.id])

    async def test_whatever_else_is_said_arrives_in_order_both_ways(self) -> None:
        await self.probes.answered(self.sandbox)
        await deferToThread(_thd_touch, 7)
        await self.fall_asleep()

        data = os.urandom(3 << 20)
        self.assertTrue(await deferToThread(_thd_echoed, data) == data)
        self.assertEqual(self.woken, [self.sandbox.id])

    async def test_a_pod_that_can_not_be_woken_ends_the_connection(self) -> None:
        await self.probes.answered(self.sandbox)
        await deferToThread(_thd_touch, 7)
        await self.fall_asleep()
        self.wake_error = Unavailable("no memory")
        with self.assertRaises(ConnectionResetError):
            await self.talk(7, b"anything")

    async def test_what_connects_to_the_daemon_itself_is_not_served(self) -> None:
        await self.probes.answered(self.sandbox)
        assert self.probes._listening is not None
        port = self.probes._listening.getHost().port  # type: ignore[attr-defined]

        def thd_direct() -> bytes:
            with socket.create_connection(("127.0.0.1", port), 20) as connection:
                return connection.recv(10)

        with self.assertRaises(ConnectionResetError):
            await deferToThread(thd_direct)

    async def test_only_what_goes_to_others_than_the_node_is_counted(self) -> None:
        await self.probes.answered(self.sandbox)
        before = await self.probes.sent(self.sandbox)
        await self.talk(80, _request())
        self.patch(connection_probes, "COUNT_SECONDS", 0.0)
        self.assertEqual(await self.probes.sent(self.sandbox), before)
        forwarding = Path("/proc/sys/net/ipv4/ip_forward")
        self.addCleanup(forwarding.write_text, forwarding.read_text())
        forwarding.write_text("1")
        subprocess.run(["ip", "route", "add", "10.123.47.0/24", "dev", self.namespace], check=True)
        inside = ["ip", "netns", "exec", self.namespace, sys.executable, "-c", _DATAGRAM]
        await deferToThread(subprocess.run, inside, check=True)
        self.assertEqual(await self.probes.sent(self.sandbox), (before or 0) + 1)
        self.assertIsNone(await self.probes.sent(_sandbox("10.123.46.3")))

    async def test_a_pod_that_is_gone_leaves_its_address(self) -> None:
        await self.probes.answered(self.sandbox)
        await deferToThread(_thd_touch, 7)
        await self.fall_asleep()
        for _ in range(2):
            await self.probes.address_released(self.sandbox.id)
        await deferToThread(_thd_touch, 7)
        await until(lambda: 7 in self.connections(), "the next pod of the address is called")
        self.assertEqual(self.woken, [])

    async def test_the_next_pod_of_an_address_that_was_not_released_is_called_itself(self) -> None:
        await self.probes.answered(self.sandbox)
        await deferToThread(_thd_touch, 7)
        await self.fall_asleep()
        await self.probes.answered(_sandbox(POD))
        await deferToThread(_thd_touch, 7)
        await until(lambda: 7 in self.connections(), "the next pod of the address is called")
        self.assertEqual(self.woken, [])

    async def test_another_program_may_remove_the_tables(self) -> None:
        await self.probes.answered(self.sandbox)
        await deferToThread(_thd_touch, 25)
        await self.fall_asleep()
        await self.table.remove()
        self.assertEqual(self.tables(), [])
        await self.probes.sweep()
        self.assertTrue(await deferToThread(_thd_touch, 25))
        self.assertEqual(self.connections(), [])
        await self.table.remove()
        await self.probes.address_released(self.sandbox.id)
        self.assertEqual(self.tables(), [])

    async def test_the_next_daemon_begins_anew_and_a_stopped_one_leaves_nothing(self) -> None:
        await self.probes.answered(self.sandbox)
        await deferToThread(_thd_touch, 25)
        await self.fall_asleep()
        killed, self.probes = self.probes, self.make_probes()
        await self.probes.resume([self.sandbox])  # type: ignore[arg-type]
        self.assertTrue(await deferToThread(_thd_touch, 25))
        await until(lambda: 25 in self.connections(), "the pod was called")
        self.assertEqual(len(self.tables()), 2)
        await self.probes.stop()
        self.assertEqual(self.tables(), [])
        await killed.stop()

    async def test_connections_end_by_themselves_when_the_daemon_is_killed(self) -> None:
        await self.probes.answered(self.sandbox)
        await deferToThread(_thd_touch, 25)
        await self.fall_asleep()
        command = ["nft", "-j", "list", "set", "ip", f"infranetes_{self.namespace}", "answered"]
        listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        self.assertIn('"expires"', listed)

    async def test_of_pods_that_do_not_ask_for_it_nothing_is_made(self) -> None:
        self.seconds = 0.0
        await self.probes.answered(self.sandbox)
        await self.probes.falls_asleep(self.sandbox)
        await self.probes.sleeps(self.sandbox)
        await self.probes.awakes(self.sandbox)
        self.assertEqual(self.tables(), [])


def _sandbox(address: str) -> Sandbox:
    id = secrets.token_hex(16)
    return lone_sandbox(
        SandboxRecord(
            id=id, token=id, state=SandboxState.READY, name=id, config=b"", runtime_handler="", created_at=1,
            provider="fake", kind="docker", address=address,
        )
    )  # fmt: skip
