# SPDX-License-Identifier: Apache-2.0
"""Which host ports a pod requests, and which it can't have."""

from __future__ import annotations

import socket
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from infranetes.hostports.mappings import HostPort, check_unused, host_ports_of
from infranetes.hostports.table import Routes, script
from infranetes_common.errors import FailedPrecondition, InvalidArgument
from infranetes_common.wire import cri


def asked(*mappings: dict[str, Any]) -> tuple[HostPort, ...]:
    return host_ports_of(cri.PodSandboxConfig(port_mappings=[cri.PortMapping(**one) for one in mappings]))


class MappingTests(SynchronousTestCase):
    def test_those_without_a_host_port_are_none(self) -> None:
        self.assertEqual(asked({"container_port": 80}, {}), ())

    def test_a_pod_on_the_nodes_network_has_its_ports_there(self) -> None:
        options = cri.NamespaceOption(network=cri.NODE)
        security = cri.LinuxSandboxSecurityContext(namespace_options=options)
        ports: list[dict[str, Any]] = [{"container_port": 80}, {"container_port": 81, "host_port": 8081}, {}]
        config = cri.PodSandboxConfig(
            port_mappings=[cri.PortMapping(**one) for one in ports],
            linux=cri.LinuxPodSandboxConfig(security_context=security),
        )
        self.assertEqual(list(map(str, host_ports_of(config))), ["80/tcp", "8081/tcp"])

    def test_protocols_and_addresses(self) -> None:
        found = asked(
            {"host_port": 8080, "container_port": 80},
            {"host_port": 8080, "container_port": 80, "host_ip": "0.0.0.0"},
            {"host_port": 8080, "container_port": 81, "protocol": cri.UDP, "host_ip": "192.0.2.1"},
            {"host_port": 1, "container_port": 1, "protocol": cri.SCTP},
        )
        self.assertEqual(list(map(str, found)), ["8080/tcp", "192.0.2.1:8080/udp", "1/sctp"])

    def test_what_is_malformed_is_named(self) -> None:
        good = {"host_port": 8080, "container_port": 80}
        for wrong, words in (
            ({"host_port": 65536}, "host_port 65536"),
            ({"host_port": -1}, "host_port -1"),
            ({"container_port": 0}, "container_port 0"),
            ({"protocol": 7}, "protocol 7"),
            ({"host_ip": "fd00::1"}, "IPv4"),
            ({"host_ip": "node"}, "IPv4"),
            ({"host_ip": "224.0.0.1"}, "224.0.0.1"),
            ({"container_port": 81}, "asked for twice"),
            ({"container_port": 81, "host_ip": "192.0.2.1"}, "asked for twice"),
        ):
            error = self.assertRaises(InvalidArgument, asked, good, {**good, **wrong})
            self.assertIn("config.port_mappings[1]", str(error))
            self.assertIn(words, str(error))

    def test_two_clash_where_a_packet_could_be_meant_for_both(self) -> None:
        one = HostPort("tcp", "", 80, 1)
        self.assertTrue(one.clashes(HostPort("tcp", "192.0.2.1", 80, 2)))
        self.assertTrue(HostPort("tcp", "192.0.2.1", 80, 2).clashes(one))
        self.assertFalse(HostPort("tcp", "192.0.2.1", 80, 2).clashes(HostPort("tcp", "192.0.2.2", 80, 2)))
        self.assertFalse(one.clashes(HostPort("udp", "", 80, 1)))
        self.assertFalse(one.clashes(HostPort("tcp", "", 81, 1)))

    def test_a_port_that_the_node_uses_is_refused(self) -> None:
        for protocol, kind in (("tcp", socket.SOCK_STREAM), ("udp", socket.SOCK_DGRAM)):
            with socket.socket(socket.AF_INET, kind) as used:
                used.bind(("127.0.0.1", 0))
                if protocol == "tcp":
                    used.listen()
                port = used.getsockname()[1]
                for address in ("", "127.0.0.1"):
                    error = self.assertRaises(
                        FailedPrecondition, check_unused, HostPort(protocol, address, port, 1)
                    )
                    self.assertIn(f"{port}/{protocol} is used by a process", str(error))
            check_unused(HostPort(protocol, "", port, 1))
        error = self.assertRaises(FailedPrecondition, check_unused, HostPort("tcp", "192.0.2.1", 1, 1))
        self.assertIn("no such address", str(error))

    def test_the_table_has_each_in_its_place(self) -> None:
        ports = {HostPort("tcp", "", 80, 8080): "10.0.0.2", HostPort("udp", "192.0.2.1", 53, 53): "10.0.0.3"}
        text = script("t", ports, Routes(("br",), ("10.0.0.0/24",), ("10.9.0.1",)))
        self.assertIn("elements = { tcp . 80 : 10.0.0.2 . 8080 }", text)
        self.assertIn("elements = { 192.0.2.1 . udp . 53 : 10.0.0.3 . 53 }", text)
        self.assertIn("elements = { 10.0.0.2 . tcp . 8080, 10.0.0.3 . udp . 53 }", text)
        self.assertIn("elements = { 127.0.0.0/8, 10.0.0.0/24 }", text)
        self.assertIn("elements = { 10.9.0.1 }", text)
