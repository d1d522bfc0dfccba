# SPDX-License-Identifier: Apache-2.0
"""Host ports in this machine's kernel: a pod is a network namespace with a veth to the node."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from infranetes.hostports.hostports import HostPorts, table_name
from infranetes.hostports.mappings import host_ports_of
from infranetes.hostports.table import HostPortTable
from infranetes.pods.features.host_ports import ports_in_force, ports_of, taken_ports
from infranetes.pods.node.inventory import Sandbox
from infranetes.pods.store.records import SandboxRecord
from infranetes.pods.store.states import SandboxState
from infranetes_common.errors import FailedPrecondition, InfranetesError
from infranetes_common.reactors import installed
from infranetes_common.wire import cri
from tests.harness.needs import needs_netns
from tests.harness.tools import need
from tests.infranetes.pods.fakes import lone_sandbox, pod
from tests.support import frames
from tests.support.frames import TapHost

reactor = installed()

NODE, POD = "10.123.45.1", "10.123.45.2"
# Replies to each client with the address that it sees, over TCP and UDP.
_SERVER = """
import socket, threading
t = socket.create_server(("0.0.0.0", 80))
u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
u.bind(("0.0.0.0", 53))
def datagrams():
    while True:
        _, peer = u.recvfrom(100)
        u.sendto(peer[0].encode(), peer)
threading.Thread(target=datagrams, daemon=True).start()
print("ready", flush=True)
while True:
    c, peer = t.accept()
    c.sendall(peer[0].encode())
    c.close()
"""
_CLIENT = """
import socket, sys
c = socket.create_connection((sys.argv[1], int(sys.argv[2])), 5)
print(c.recv(100).decode())
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def call(host: str, port: int, kind: int = socket.SOCK_STREAM) -> str:
    """Return the client address that the pod sees, or "" without an answer."""
    with socket.socket(socket.AF_INET, kind) as client:
        client.settimeout(5.0 if kind == socket.SOCK_STREAM else 0.5)
        for _ in range(10):
            try:
                client.connect((host, port))
                if kind == socket.SOCK_DGRAM:
                    client.send(b"?")
                return client.recv(100).decode()
            except TimeoutError:
                continue
            except OSError:
                return ""
    return ""


def ruleset() -> str:
    return subprocess.run(["nft", "list", "ruleset"], check=True, capture_output=True, text=True).stdout


def sandbox(state: SandboxState = SandboxState.READY, address: str = POD, **fields: Any) -> Sandbox:
    """Return a sandbox with these port mappings."""
    mappings = [cri.PortMapping(**one) for one in fields.pop("ports")]
    config = pod(port_mappings=mappings, **fields)
    id = secrets.token_hex(16)
    return lone_sandbox(
        SandboxRecord(
            id=id, token=id, state=state, name=id, config=config.SerializeToString(),
            runtime_handler="", created_at=1, provider="fake", kind="docker", address=address,
        )
    )  # fmt: skip


@needs_netns
class HostPortTests(TestCase):
    async def setUp(self) -> None:
        need("ip")
        need("nft")
        word = secrets.token_hex(3)
        self.link, self.space = f"hp{word}", f"hp-{word}"
        self.name = table_name(Path(self.mktemp()))
        self.addCleanup(subprocess.run, ["ip", "link", "delete", self.link], capture_output=True)
        ip("netns", "add", self.space)
        self.addCleanup(ip, "netns", "delete", self.space)
        ip("link", "add", self.link, "type", "veth", "peer", "name", "eth0", "netns", self.space)
        ip("address", "add", f"{NODE}/24", "dev", self.link)
        ip("link", "set", self.link, "up")
        for words in ("address add " + POD + "/24 dev eth0", "link set eth0 up", "link set lo up",
                      "route add default via " + NODE):  # fmt: skip
            ip("-n", self.space, *words.split())
        inside = ["ip", "netns", "exec", self.space, sys.executable]
        self.inside = inside
        server = subprocess.Popen([*inside, "-c", _SERVER], stdout=subprocess.PIPE)
        self.addCleanup(server.wait)
        self.addCleanup(server.kill)
        assert server.stdout is not None
        self.addCleanup(server.stdout.close)
        self.assertEqual(await deferToThread(server.stdout.readline), b"ready\n")
        self.table = HostPortTable(reactor, self.name)
        self.addCleanup(subprocess.run, ["nft", "delete", "table", "ip", self.name], capture_output=True)
        self.ports = HostPorts(self.table)
        self.port = 20000 + secrets.randbelow(10000)

    async def reached(self, *words: Any) -> str:
        return await deferToThread(call, *words)

    def tcp(self, **fields: Any) -> dict[str, Any]:
        return {"host_port": self.port, "container_port": 80, **fields}

    async def test_from_the_node_from_its_loopback_and_from_the_pod_itself(self) -> None:
        udp = {"host_port": self.port, "container_port": 53, "protocol": cri.UDP}
        one = sandbox(ports=[self.tcp(), udp])
        self.ports.check(host_ports_of(one.config), [])
        self.assertEqual(await self.reached("127.0.0.1", self.port), "")
        for _ in range(2):
            await self.ports.put(ports_of(one))
        self.assertEqual(await self.reached("127.0.0.1", self.port), NODE)
        self.assertEqual(await self.reached(NODE, self.port), NODE)
        self.assertEqual(await self.reached(NODE, self.port, socket.SOCK_DGRAM), NODE)
        inside = [*self.inside, "-c", _CLIENT, NODE, str(self.port)]
        said = await deferToThread(subprocess.run, inside, capture_output=True, text=True)
        self.assertEqual((said.stdout, said.stderr), (NODE + "\n", ""))
        await self.ports.remove(one.id)
        await self.ports.remove(one.id)
        self.assertEqual(await self.reached(NODE, self.port), "")
        self.assertNotIn(self.name, ruleset())

    async def test_at_one_address_alone(self) -> None:
        one = sandbox(ports=[self.tcp(host_ip="127.0.0.1")])
        await self.ports.put(ports_of(one))
        self.assertEqual(await self.reached("127.0.0.1", self.port), NODE)
        self.assertEqual(await self.reached(NODE, self.port), "")

    async def test_loopback_stays_the_nodes_own(self) -> None:
        await self.ports.put(ports_of(sandbox(ports=[self.tcp()])))
        for words in (
            "rule add pref 10 lookup local",
            "rule delete pref 0",
            f"route add 127.9.9.9 via {NODE} table 99",
            "rule add pref 1 to 127.9.9.9 lookup 99",
        ):
            ip("-n", self.space, *words.split())
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listening:
            listening.bind(("0.0.0.0", 0))
            port = listening.getsockname()[1]
            listening.settimeout(5.0)
            for address in ("127.9.9.9", NODE):
                script = f"import socket; socket.socket(2, 2).sendto(b'{address}', ('{address}', {port}))"
                await deferToThread(subprocess.run, [*self.inside, "-c", script], check=True)
            self.assertEqual(listening.recv(100).decode(), NODE, "the first one did not come")

    async def test_after_a_restart_what_the_sandboxes_have_and_nothing_else(self) -> None:
        others = HostPorts(HostPortTable(reactor, self.name + "x"))
        self.addCleanup(
            subprocess.run, ["nft", "delete", "table", "ip", self.name + "x"], capture_output=True
        )
        await others.put(ports_of(sandbox(ports=[self.tcp(host_port=self.port + 2)])))
        await self.ports.put(ports_of(sandbox(ports=[self.tcp(host_port=self.port + 1)])))
        kept = sandbox(ports=[self.tcp()])
        again = HostPorts(HostPortTable(reactor, self.name))
        stopped = sandbox(SandboxState.STOPPED, ports=[self.tcp(host_port=self.port + 3)])
        await again.restore(ports_in_force([kept, stopped]))
        self.assertEqual(await self.reached(NODE, self.port), NODE)
        self.assertEqual(await self.reached(NODE, self.port + 2), NODE, "another daemon's stay")
        for gone in (1, 3):
            self.assertEqual(await self.reached(NODE, self.port + gone), "")
        await HostPorts(HostPortTable(reactor, self.name)).restore([])
        self.assertEqual(await self.reached(NODE, self.port), "")

    async def test_a_sweep_puts_right_what_others_did(self) -> None:
        one = sandbox(ports=[self.tcp(), self.tcp(host_port=self.port + 1, host_ip=NODE)])
        await self.ports.put(ports_of(one))
        before = await self.table.current()
        self.assertEqual(len(before or ()), 2)
        table = ["nft", "--handle", "list", "table", "ip", self.name]
        handles = subprocess.check_output(table)
        await self.ports.sweep()
        self.assertEqual(subprocess.check_output(table), handles)
        subprocess.run(["nft", "flush", "map", "ip", self.name, "anywhere"], check=True)
        await self.ports.sweep()
        self.assertEqual(await self.table.current(), before)
        subprocess.run(["nft", "delete", "table", "ip", self.name], check=True)
        await self.ports.sweep()
        self.assertEqual(await self.table.current(), before)

    async def test_a_port_that_is_taken_names_who_has_it(self) -> None:
        one = sandbox(SandboxState.LAUNCHING, ports=[self.tcp(host_ip="127.0.0.1")])
        asked = host_ports_of(sandbox(ports=[self.tcp()]).config)
        error = self.assertRaises(FailedPrecondition, self.ports.check, asked, taken_ports([one]))
        self.assertIn(f"host port {self.port}/tcp is taken by sandbox {one.id} (pod default/web)", str(error))
        one.record = attrs.evolve(one.record, state=SandboxState.STOPPED)
        self.ports.check(asked, taken_ports([one]))
        with socket.create_server((NODE, self.port)):
            error = self.assertRaises(FailedPrecondition, self.ports.check, asked, taken_ports([one]))
            self.assertIn("used by a process", str(error))

    async def test_what_fails_changes_nothing(self) -> None:
        one = sandbox(ports=[self.tcp()])
        await self.ports.put(ports_of(one))
        bad = sandbox(address="not.an.address", ports=[self.tcp(host_port=self.port + 1)])
        with self.assertRaises(InfranetesError):
            await self.ports.put(ports_of(bad))
        self.assertEqual(await self.reached(NODE, self.port), NODE)
        await self.ports.sweep()
        self.assertEqual(await self.table.current(), {f"tcp . {self.port} : {POD} . 80"})


class Killed(BaseException):
    """Raised where the daemon is killed."""


class MortalTable(HostPortTable):
    """A table whose daemon is killed before or after its nth change to the kernel."""

    def __init__(self, name: str, moment: int, after: bool) -> None:
        super().__init__(reactor, name)
        self.left, self.after = moment, after

    async def _nft(self, text: str) -> None:
        self.step(False)
        await super()._nft(text)
        self.step(True)

    async def _write(self, interface: str, value: str) -> None:
        self.step(False)
        await super()._write(interface, value)
        self.step(True)

    def step(self, done: bool) -> None:
        if done == self.after:
            self.left -= 1
            if self.left == 0:
                raise Killed


@needs_netns
class LoopbackTests(TestCase):
    """Services on the node's 127.0.0.1 are for the node alone: a pod is a tap that may send anything."""

    def setUp(self) -> None:
        need("nft")
        self.link = f"hp{secrets.token_hex(4)}"
        self.name = table_name(Path(self.mktemp()))
        self.addCleanup(subprocess.run, ["nft", "delete", "table", "ip", self.name], capture_output=True)
        self.pod = TapHost(self.link, POD)
        self.addCleanup(self.pod.close)
        ip("address", "add", f"{NODE}/24", "dev", self.link)
        ip("link", "set", self.link, "up")
        self.hardware = Path(f"/sys/class/net/{self.link}/address").read_text().strip()
        self.setting = Path(f"/proc/sys/net/ipv4/conf/{self.link}/route_localnet")
        self.one = sandbox(ports=[{"host_port": 20000 + secrets.randbelow(10000), "container_port": 80}])
        self.listening = self.listener("127.0.0.1")
        self.outside = self.listener(NODE)

    def listener(self, address: str) -> socket.socket:
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.addCleanup(made.close)
        made.bind((address, 0))
        made.setblocking(False)
        return made

    def heard(self, listening: socket.socket, source: str, to: str) -> bool:
        packet = frames.udp(source, to, b"for the node alone", (1000, listening.getsockname()[1]))
        self.pod.send(frames.ethernet(self.hardware, self.pod.mac, frames.IPV4, packet))
        try:
            return bool(listening.recv(100))
        except BlockingIOError:
            return False

    def check_closed(self, when: str) -> None:
        self.assertTrue(self.heard(self.outside, POD, NODE), when)
        self.assertFalse(self.heard(self.listening, POD, "127.0.0.1"), f"{when}: 127.0.0.1 was reached")
        self.assertFalse(self.heard(self.outside, "127.0.0.1", NODE), f"{when}: 127.0.0.1 was believed")

    async def test_before_during_and_after_a_pod_with_host_ports(self) -> None:
        ports = HostPorts(HostPortTable(reactor, self.name))
        await ports.restore([])
        self.check_closed("before")
        await ports.put(ports_of(self.one))
        self.assertEqual(self.setting.read_text(), "1\n")
        self.check_closed("with a host port")
        await ports.remove(self.one.id)
        self.check_closed("after the last one")
        self.assertEqual(self.setting.read_text(), "0\n")
        self.assertNotIn(self.name, ruleset())

    async def test_a_daemon_that_is_killed_at_any_moment(self) -> None:
        for after in (False, True):
            for moment in range(1, 100):
                mortal = HostPorts(MortalTable(self.name, moment, after))
                try:
                    await mortal.put(ports_of(self.one))
                    await mortal.remove(self.one.id)
                    self.assertGreater(moment, 4)  # for two tables and two sysctls
                    break
                except Killed:
                    self.check_closed(f"killed at {moment}")
                kept = HostPorts(HostPortTable(reactor, self.name))
                await kept.restore(ports_in_force([self.one]))
                self.check_closed(f"killed at {moment}, and started with the port")
                self.assertEqual(self.setting.read_text(), "1\n")
                await HostPorts(HostPortTable(reactor, self.name)).restore([])
                self.check_closed(f"killed at {moment}, and started without the port")
                self.assertEqual(self.setting.read_text(), "0\n")
                self.assertNotIn(self.name, ruleset())

    async def test_somebody_elses_setting_stays_and_is_guarded(self) -> None:
        self.setting.write_text("1")
        ports = HostPorts(HostPortTable(reactor, self.name))
        await ports.put(ports_of(self.one))
        await ports.remove(self.one.id)
        self.assertEqual(self.setting.read_text(), "1\n")
        self.check_closed("after the last one")
        again = HostPorts(HostPortTable(reactor, self.name))
        await again.restore([])
        self.check_closed("after a restart")
        self.setting.write_text("0")
        await again.sweep()
        self.assertNotIn(self.name, ruleset())

    async def test_a_sweep_opens_what_somebody_else_closed(self) -> None:
        ports = HostPorts(HostPortTable(reactor, self.name))
        await ports.put(ports_of(self.one))
        self.setting.write_text("0")
        await ports.sweep()
        self.assertEqual(self.setting.read_text(), "1\n")

    async def test_an_interface_that_is_gone_is_no_trouble(self) -> None:
        ports = HostPorts(HostPortTable(reactor, self.name))
        await ports.put(ports_of(self.one))
        self.pod.close()
        await ports.remove(self.one.id)
        self.assertNotIn(self.name, ruleset())

    async def test_the_guard_stays_where_the_setting_can_not_be_set_back(self) -> None:
        await HostPorts(HostPortTable(reactor, self.name)).put(ports_of(self.one))
        proc = Path(self.mktemp())
        path = proc / "net/ipv4/conf" / self.link / "route_localnet"
        path.mkdir(parents=True)
        with self.assertRaisesRegex(InfranetesError, "the rule that guards it stays"):
            await HostPortTable(reactor, self.name, proc).replace({})
        self.check_closed("not set back")


class NameTests(TestCase):
    def test_each_state_directory_has_its_own_table(self) -> None:
        self.assertNotEqual(table_name(Path("/a")), table_name(Path("/b")))
        self.assertRegex(table_name(Path(os.sep)), r"\Ainfranetes_hostports_[0-9a-f]{8}\Z")
