# SPDX-License-Identifier: Apache-2.0
"""The agents' port on the bridge is the node's alone: real packets on every way to it, on this kernel."""

from __future__ import annotations

import secrets
import select
import socket
import struct
import subprocess
import time
from pathlib import Path

import attrs

from infranetes_common.identity import AGENT_PORT
from infranetes_common.network_namespaces import thd_in_namespace
from infranetes_common.pod_firewall import Allowed, PodFirewall
from tests.harness.durations import slow
from tests.infranetes.providers.qemu.network.firewall_case import (
    EVERYWHERE,
    NODE,
    OUTSIDE,
    OUTSIDE_OF_NODE,
    SUBNET,
    FirewallCase,
    blocking,
)
from tests.support.frames import IPV4, IPV6, ethernet
from tests.support.pod_namespaces import DOES_NOT, Daemon, Host, Machine, connects, ip
from tests.support.segments import MORE_FRAGMENTS, packet, syn

_BRIDGED_CALL = Path("/proc/sys/net/bridge/bridge-nf-call-iptables")
SERVICE = "198.51.100.10"
_SYN = b"\2"
_FLOOD = 1000  # SYNs


def in_fragments(source: str, to: str, cut: int, port: int = AGENT_PORT) -> list[bytes]:
    """Return a SYN in two fragments, the second one first. :param cut: bytes of TCP in the first one."""
    whole = syn(source, to, port)
    return [
        packet(source, to, whole[cut:], cut // 8),
        packet(source, to, whole[:cut], MORE_FRAGMENTS),
    ]


class Sniffer:
    """What reaches a machine's network card; `end` closes it."""

    def __init__(self, machine: Machine) -> None:
        self._socket = thd_in_namespace(
            machine.name, lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
        )
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
        self._socket.bind(("eth0", 3))
        self.end = self._socket.close

    def calls(self, port: int = AGENT_PORT) -> int:
        """Count the SYNs to a port that came since the last time; a fragment may end before its flags."""
        found = 0
        while select.select([self._socket], [], [], DOES_NOT)[0]:
            frame, (_, _, direction, *_) = self._socket.recvfrom(2000)
            if direction == socket.PACKET_OUTGOING:
                continue
            kind, start, protocol = frame[12:14], 14 + (frame[14] & 0xF) * 4, frame[23]
            if kind == IPV6.to_bytes(2, "big"):
                start, protocol = 54, frame[20]
            segment = frame[start:]
            if protocol == socket.IPPROTO_TCP and segment[2:4] == port.to_bytes(2, "big"):
                found += segment[13:14] in (b"", b"\0", _SYN)
        return found


@slow(3, "fragments that must not come")
class AgentPortTests(FirewallCase):
    """With NetworkPolicies that let everybody in."""

    async def setUp(self) -> None:
        await super().setUp()
        self.sniffer = await blocking(Sniffer, self.b)
        self.addCleanup(self.sniffer.end)
        self.server = await blocking(self.b.socket, socket.SOCK_STREAM)
        self.server.bind(("0.0.0.0", AGENT_PORT))
        self.server.listen()
        self.daemon = Daemon(NODE)
        self.addCleanup(self.daemon.end)
        await self.open_all()

    async def translate(self, address: str, port: int, to: str) -> None:
        """Have the node lead a port of an address to a pod's agent, as kube-proxy does, source and all."""
        table = f"inftest{secrets.token_hex(4)}"
        lead = f"ip daddr {address} tcp dport {port} dnat to {to}:{AGENT_PORT}"
        script = f"""table ip {table} {{
            chain before {{
                type nat hook prerouting priority dstnat;
                {lead}
            }}
            chain own {{
                type nat hook output priority -100;
                {lead}
            }}
            chain after {{
                type nat hook postrouting priority 90;
                ct original ip daddr {address} ip daddr {to} masquerade
            }}
        }}"""
        await blocking(subprocess.run, ["nft", "-f", "-"], input=script.encode(), check=True)
        self.addCleanup(subprocess.run, ["nft", "delete", "table", "ip", table], check=True)

    async def daemon_connects(self) -> None:
        self.assertTrue(await blocking(connects, self.daemon, self.b.address, AGENT_PORT, 5.0))
        self.assertGreater(await blocking(self.sniffer.calls), 0, "the sniffer hears")

    async def none_comes(self, client: Host, to: str, port: int = AGENT_PORT) -> None:
        self.assertFalse(await blocking(connects, client, to, port, DOES_NOT), (client.address, to, port))
        for each in (AGENT_PORT, port):
            self.assertEqual(await blocking(self.sniffer.calls, each), 0, (client.address, to, port))

    async def test_neither_pods_nor_others_reach_it_on_any_way(self) -> None:
        await self.translate(SERVICE, 80, self.b.address)
        await self.translate(OUTSIDE_OF_NODE, 32475, self.b.address)
        await self.translate(NODE, 32475, self.b.address)
        await blocking(ip, "route", "add", f"{SERVICE}/32", "via", OUTSIDE)
        for client in (self.a, self.outside, self.node):  # the node's other programs: kubelet, for a probe
            await self.none_comes(client, self.b.address)
            await self.none_comes(client, SERVICE, 80)
        await self.none_comes(self.outside, OUTSIDE_OF_NODE, 32475)
        await self.none_comes(self.a, NODE, 32475)
        await self.none_comes(self.b, SERVICE, 80)  # by the node, back to where it is from
        await self.daemon_connects()
        await self.reaches(self.a, self.b)
        await self.reaches(self.outside, self.b)

    async def test_the_daemon_may_come_by_a_translated_address(self) -> None:
        await blocking(ip, "route", "add", f"{SERVICE}/32", "via", OUTSIDE)
        await self.translate(SERVICE, 80, self.b.address)
        self.assertTrue(await blocking(connects, self.daemon, SERVICE, 80, 5.0))

    async def test_an_agent_that_has_another_port(self) -> None:
        port = attrs.evolve(self.b.port, agent_port=4242)
        listening = await blocking(self.b.socket, socket.SOCK_STREAM)
        listening.bind(("0.0.0.0", 4242))
        listening.listen()
        await self.network.allow(port)
        for _ in range(2):
            for client in (self.a, self.outside, self.node):
                await self.none_comes(client, self.b.address, 4242)
            self.assertTrue(await blocking(connects, self.daemon, self.b.address, 4242, 5.0))
            await self.reaches(self.a, self.c, 4242)
            await self.network.set_up(SUBNET, [each.port for each in (self.a, self.c)] + [port])
        await self.network.forbid(port)
        await self.network.allow(self.b.port)
        self.assertTrue(await blocking(connects, self.a, self.b.address, 4242, 5.0))

    async def test_no_fragment_slips_by(self) -> None:
        for client in (self.a, self.outside):
            raw = await blocking(client.socket, socket.SOCK_RAW, socket.IPPROTO_RAW)
            raw.setsockopt(socket.IPPROTO_IP, socket.IP_HDRINCL, 1)
            source, to = client.address, self.b.address
            attempts = [in_fragments(source, to, cut) for cut in (8, 16, 24)]
            attempts += [each[::-1] for each in attempts]
            attempts.append([packet(source, to, syn(source, to), options=bytes([1] * 40))])
            for attempt in attempts:
                for each in attempt:
                    raw.sendto(each, (to, 0))
                self.assertEqual(await blocking(self.sniffer.calls), 0, attempt)
                self.assertEqual(await blocking(select.select, [self.server], [], [], 0), ([], [], []))
            for each in in_fragments(source, to, 8, 8000):
                raw.sendto(each, (to, 0))
            self.assertGreater(await blocking(self.sniffer.calls, 8000), 0, "others' fragments pass")

    async def test_nor_what_comes_past_the_nodes_own_rules(self) -> None:
        """From a port that somebody else has put on the bridge, and sent out by the bridge as BPF does it."""
        interface = f"str{secrets.token_hex(4)}"
        stranger = await blocking(Machine, interface, "10.221.0.9", NODE, "02:00:00:00:00:09")
        self.addCleanup(stranger.end)
        await blocking(ip, "link", "set", "dev", interface, "master", self.bridge)
        await self.none_comes(stranger, self.b.address)
        to, ends = self.b.address, (self.b.port.mac, "02:00:00:00:00:02")
        sixth = struct.pack("!IHBB15xB15xB", 6 << 28, 28, 6, 64, 1, 2) + syn(OUTSIDE, to)
        frames = [
            ethernet(*ends, IPV4, packet(OUTSIDE, to, syn(OUTSIDE, to))),
            ethernet(*ends, IPV6, sixth),
        ]
        other = ethernet(*ends, IPV4, packet(OUTSIDE, to, syn(OUTSIDE, to, 8000)))
        for machine in (stranger, self.outside):
            wire = await blocking(self.wire, machine)
            if machine is self.outside:
                for command in (
                    f"tc qdisc add dev {self.uplink} ingress",
                    f"tc filter add dev {self.uplink} ingress protocol all u32 match u8 0 0 "
                    f"action mirred egress redirect dev {self.bridge}",
                ):
                    await blocking(subprocess.run, command.split(), check=True)
            for frame in frames:
                wire.send(frame)
            self.assertEqual(await blocking(self.sniffer.calls), 0, machine.address)
            wire.send(other)
            passes = not self.policies or machine is self.outside
            self.assertEqual(await blocking(self.sniffer.calls, 8000), passes, "another port")

    def wire(self, machine: Machine) -> socket.socket:
        """Return a socket that sends frames by a machine's network card."""
        made = thd_in_namespace(machine.name, lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW))
        self.addCleanup(made.close)
        made.bind(("eth0", 0))
        return made

    async def test_a_flood_does_not_reach_the_vm(self) -> None:
        """Also with policies that name everybody and this port; and the node's connection goes on."""
        if self.policies:
            await self.firewalls.set(self.b.port, PodFirewall(ingress=(Allowed((EVERYWHERE,), None),)))
        connection = await blocking(self.b_and_daemon)
        for client in (self.a, self.outside):
            raw = await blocking(client.socket, socket.SOCK_RAW, socket.IPPROTO_TCP)
            segment = syn(client.address, self.b.address)
            began = time.monotonic()
            for _ in range(_FLOOD):
                raw.sendto(segment, (self.b.address, 0))
            self.assertLess(time.monotonic() - began, 20.0)
            self.assertEqual(await blocking(self.sniffer.calls), 0)
        for back in (False, True):
            connection[back].sendall(b"x")
            self.assertEqual(await blocking(connection[not back].recv, 9), b"x")

    def b_and_daemon(self) -> tuple[socket.socket, socket.socket]:
        client = self.daemon.socket(socket.SOCK_STREAM)
        client.settimeout(5.0)
        client.connect((self.b.address, AGENT_PORT))
        accepted, _ = self.server.accept()
        self.sniffer.calls()
        self.addCleanup(accepted.close)
        return client, accepted


@slow(3, "fragments that must not come")
class OpenAgentPortTests(AgentPortTests):
    """Without NetworkPolicies, pods' frames go from port to port; where no module takes them, past `ip`."""

    policies = False

    async def setUp(self) -> None:
        await super().setUp()
        if _BRIDGED_CALL.exists():
            before = _BRIDGED_CALL.read_text()
            self.addCleanup(_BRIDGED_CALL.write_text, before)
            _BRIDGED_CALL.write_text("0\n")
