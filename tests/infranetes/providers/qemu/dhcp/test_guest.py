# SPDX-License-Identifier: Apache-2.0
"""A system that knows nothing but DHCP boots in a VM on the bridge: it has its network, and Services."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from infranetes.providers.machine_images import Names
from infranetes.providers.qemu.dhcp.servers import Guest, Servers
from infranetes.providers.qemu.network.bridge import BridgePort, open_tap
from infranetes.providers.qemu.network.namespaces import Namespaces
from infranetes_common.concurrency import run_in_thread
from infranetes_common.identity import Network
from infranetes_common.pod_firewall import OPEN
from infranetes_common.reactors import installed
from infranetes_common.service_proxy.kernel import Kernel
from infranetes_common.service_proxy.proxy import ServiceProxy, Update, Version
from infranetes_common.service_proxy.rules import Key, Rule, Target
from infranetes_common.service_proxy.script import of_bridge
from tests.guests import catalogue, tiny
from tests.guests.machine import Machine
from tests.harness.durations import slow
from tests.harness.needs import needs_guests, needs_qemu
from tests.infranetes.providers.qemu.network.firewall_case import NODE, SUBNET, FirewallCase, blocking
from tests.support.pod_namespaces import connects
from tests.support.waiting import until

reactor = installed()
OWN, SERVICE = "10.221.0.9", "10.96.0.10"
NAMES = Names("web-0", ("10.96.0.53",), ("shop.svc.cluster.local",))


@needs_qemu
@needs_guests("tiny.raw")
@slow(15, "it boots a system, which is emulated where there is no KVM")
class GuestTests(FirewallCase):
    async def test_it_has_its_network_though_policies_close_it_and_reaches_services(self) -> None:
        port = BridgePort(f"{self.bridge}000f", OWN, served=True)
        tap = await run_in_thread(reactor, open_tap, port.tap)
        await self.network.allow(port)
        await self.network.join(port)
        servers = Servers(reactor, Namespaces(reactor))
        self.addCleanup(servers.close)
        directory = Path(self.mktemp()).absolute()
        directory.mkdir()
        network = Network(port.mac, f"{OWN}/{SUBNET.prefixlen}", NODE, 1400)
        await servers.serve(Guest(port.tap, None, directory), network, NAMES)
        machine = Machine(catalogue.path("tiny.raw"), directory, tap=tap, mac=port.mac)
        self.addCleanup(machine.end)
        await run_in_thread(reactor, os.close, tap)
        await machine.until(f"has {OWN}/24, as web-0")
        self.assertTrue(servers.has_address(port.tap))
        await machine.until(tiny.PROMPT)

        machine.type("ip link show eth0; ip route; cat /etc/resolv.conf\n")
        for words in ("mtu 1400", f"default via {NODE}", "search shop.svc.cluster.local", "10.96.0.53"):
            await machine.until(words)
        # Its page is reached by its address, and by a Service it reaches itself.
        await self.firewalls.set(port, OPEN)
        await until(lambda: connects(self.node, OWN, tiny.PORT, 1.0), "its page")
        await self.serve_it()
        machine.type(f"wget -q -O - http://{SERVICE}/ | sed s/hostname/itself/\n")
        await machine.until("itself=web-0")

    async def serve_it(self) -> None:
        tables = of_bridge(self.bridge)
        proxy = ServiceProxy(Kernel(reactor, tables=tables))
        self.addCleanup(blocking, self.thd_remove, tables.removal(4))
        rule = Rule((Target(OWN, tiny.PORT),), cluster_ip=True)
        rules = {Key(4, SERVICE, "tcp", 80): rule}
        await proxy.apply(Update(Version("table", 1), rules, all=True))

    def thd_remove(self, script: str) -> None:
        subprocess.run(["nft", "-f", "-"], input=script, text=True, check=True)
