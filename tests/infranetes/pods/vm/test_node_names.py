# SPDX-License-Identifier: Apache-2.0
"""The node's own DNS and host name are used for pods without any."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from infranetes.pods.vm.node_names import node_dns, parse_resolv_conf
from infranetes_common.wire import cri
from tests.infranetes.pods.case import PodsTestCase
from tests.infranetes.pods.fakes import pod

HOST_NETWORK = cri.LinuxPodSandboxConfig(
    security_context=cri.LinuxSandboxSecurityContext(namespace_options=cri.NamespaceOption(network=cri.NODE))
)


class ResolvConfTests(SynchronousTestCase):
    def said(self, text: str) -> tuple[list[str], list[str], list[str]]:
        found = parse_resolv_conf(text)
        return list(found.servers), list(found.searches), list(found.options)

    def file(self, text: str) -> Path:
        path = Path(self.mktemp())
        path.write_text(text)
        return path

    def test_what_it_says(self) -> None:
        text = "# nameserver 9.9.9.9\n; x\nnameserver\t192.0.2.1 \nnameserver 2001:db8::1\n"
        text += f"domain old.example\nsearch \N{SNOWMAN} {'x' * 300}\n\n"
        text += "search a.example  b.example\noptions ndots:2 rotate\noptions edns0\nsortlist 1.2.3.4\n"
        self.assertEqual(
            self.said(text),
            (["192.0.2.1", "2001:db8::1"], ["a.example", "b.example"], ["ndots:2", "rotate", "edns0"]),
        )

    def test_servers_that_would_be_others_in_the_machine_are_left_out(self) -> None:
        for server in ("127.0.0.53", "127.0.0.1", "::1", "fe80::1%eth0", "fe80::1", "0.0.0.0", "nonsense"):
            self.assertEqual(self.said(f"nameserver {server}\nnameserver 192.0.2.1\n")[0], ["192.0.2.1"])

    def test_a_clouds_link_local_server_stays(self) -> None:
        self.assertEqual(self.said("nameserver 169.254.169.254\n")[0], ["169.254.169.254"])

    def test_no_more_than_a_resolver_asks(self) -> None:
        text = "".join(f"nameserver 192.0.2.{number}\n" for number in range(1, 200))
        self.assertEqual(len(self.said(text)[0]), 3)

    def test_behind_systemd_resolved_those_that_it_asks(self) -> None:
        stub = self.file("nameserver 127.0.0.53\noptions edns0 trust-ad\n")
        real = self.file("nameserver 192.0.2.9\nsearch lan\n")
        found = node_dns((stub, real))
        self.assertEqual((list(found.servers), list(found.searches)), (["192.0.2.9"], ["lan"]))
        self.assertEqual(node_dns((real, stub)), found)

    def test_none_that_can_be_used_is_none(self) -> None:
        missing = Path(self.mktemp())
        self.assertEqual(node_dns((missing, self.file("nameserver ::1\n"))), cri.DNSConfig())


class LaunchTests(PodsTestCase):
    def told(self, config: Any) -> Any:
        agent: Any = self.world.agents[self.run_pod(config)]
        return agent.configured[-1], agent.node_dns[-1]

    def test_a_pod_on_the_nodes_network_has_its_host_name(self) -> None:
        config, _ = self.told(pod(linux=HOST_NETWORK))
        self.assertEqual(config.hostname, socket.gethostname())

    def test_others_have_their_own(self) -> None:
        self.assertEqual(self.told(pod("a", hostname="web-0"))[0].hostname, "web-0")
        self.assertEqual(self.told(pod("b", hostname="web-0", linux=HOST_NETWORK))[0].hostname, "web-0")
        self.assertEqual(self.told(pod("c"))[0].hostname, "")

    def test_the_machine_is_told_of_the_nodes_dns(self) -> None:
        dns = self.world.dns = cri.DNSConfig(servers=["192.0.2.1"])
        self.assertEqual(self.told(pod())[1], dns)
