# SPDX-License-Identifier: Apache-2.0
"""Other people's clients get their network, on the bridge and in a CNI's."""

from __future__ import annotations

import secrets
import signal
import subprocess
from collections.abc import Sequence
from functools import partial
from ipaddress import IPv4Network
from pathlib import Path

from twisted.internet.defer import Deferred
from twisted.trial.unittest import TestCase

from infranetes.providers.interface import Attachment
from infranetes.providers.machine_images import Names
from infranetes.providers.qemu.dhcp.servers import Guest, Servers
from infranetes.providers.qemu.network.bridge import Bridge
from infranetes.providers.qemu.network.firewalls import BridgeFirewalls
from infranetes.providers.qemu.network.namespaces import Namespaces
from infranetes_common.concurrency import run_in_thread
from infranetes_common.identity import Network
from infranetes_common.reactors import installed
from tests.harness.needs import find_program, needs_netns, needs_programs, needs_systemd
from tests.support.pod_namespaces import Pod, ip
from tests.support.spaces import Space
from tests.support.waiting import until

reactor = installed()
SUBNET, NODE, OWN = IPv4Network("10.221.0.0/24"), "10.221.0.1", "10.221.0.5"
NAMES = Names(
    "web-0", ("10.96.0.10", "fd00:96::a", "10.96.0.11"), ("shop.svc.cluster.local", "svc.cluster.local")
)
# What a client hands its script, in a file for each time that it calls it.
_SCRIPT = """#!/bin/sh
what=${reason:-$1}
env > {out}/.new && mv {out}/.new {out}/$what
case $what in
bound|BOUND) {address} ;;
PREINIT6) sleep 2 ;;
esac
"""

_WANTED = "request subnet-mask, routers, domain-name-servers, host-name, domain-search, interface-mtu;\n"

_NETWORKD = """[Match]
Name=eth0
[Network]
DHCP=ipv4
LinkLocalAddressing=no
[DHCPv4]
UseMTU=yes
"""


class Client:
    """A client in a pod's network namespace.

    :ivar said: the directory of what it told its script.
    """

    def __init__(self, pod: Pod, directory: Path, program: str, words: Sequence[str]) -> None:
        directory.mkdir()
        self.said = directory.absolute()
        script = self.said / ".script"
        address = f"ip address replace {OWN}/32 dev eth0"
        script.write_text(_SCRIPT.replace("{out}", str(self.said)).replace("{address}", address))
        script.chmod(0o755)
        wanted = self.said / ".conf"
        wanted.write_text(_WANTED)
        found = find_program(program)
        assert found is not None
        # A namespace of mounts too, so that what they keep is theirs alone.
        own = " && ".join(
            f"mkdir -p {each} && mount -t tmpfs tmpfs {each}"
            for each in ("/var/lib/dhcp", "/var/lib/dhcpcd", "/run/dhcpcd")
        )
        line = " ".join(each.format(script=script, wanted=wanted) for each in words)
        command = ["ip", "netns", "exec", pod.name, "sh", "-c", f"{own} && exec {found} {line}"]
        with (self.said / ".log").open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)

    def told(self, reason: str) -> dict[str, str]:
        """Return what it told its script; nothing yet: empty."""
        path = self.said / reason
        if not path.exists():
            return {}
        lines = path.read_text().splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)

    def renew(self) -> None:
        """Have udhcpc renew its lease now, and forget what it told."""
        for each in self.said.iterdir():
            if not each.name.startswith("."):
                each.unlink()
        self._process.send_signal(signal.SIGUSR1)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


UDHCPC = ("busybox", ("udhcpc", "-f", "-n", "-i", "eth0", "-s", "{script}",
                      *(f"-O {each}" for each in ("search", "mtu", "staticroutes", "hostname"))))  # fmt: skip
DHCLIENT = ("dhclient", ("-1", "-d", "-sf", "{script}", "-cf", "{wanted}", "eth0"))
DHCLIENT6 = ("dhclient", ("-6", "-1", "-d", "-sf", "{script}", "-cf", "/dev/null", "eth0"))
DHCPCD = ("dhcpcd", ("-B", "-4", "--noarp", "-c", "{script}", "-o", "interface_mtu", "-o", "domain_search",
                     "-o", "classless_static_routes", "-o", "host_name", "eth0"))  # fmt: skip


@needs_netns
class ClientCase(TestCase):
    """A pod whose card has no address yet, and its DHCP."""

    timeout = 120.0

    def setUp(self) -> None:
        self.tap = f"inf{secrets.token_hex(6)}"
        self.pod = Pod(self.tap, OWN, NODE)
        self.addCleanup(self.pod.end)
        ip("-n", self.pod.name, "address", "flush", "dev", "eth0", "scope", "global")
        self.servers = Servers(reactor, Namespaces(reactor))
        self.addCleanup(self.servers.close)

    async def serve(self, network: Network, attachment: Attachment | None = None) -> None:
        directory = Path(self.mktemp())
        directory.mkdir()
        await self.servers.serve(Guest(self.tap, attachment, directory), network, NAMES)

    async def join_cni(self, *more: str) -> Network:
        """Serve the card in a CNI's network. :param more: what the CNI does there, as words for `ip`."""
        self.space = Space("cni")
        self.addCleanup(self.space.end)
        self.space.ip(
            f"link add eth0 address {self.pod.port.mac} type veth peer name host0",
            "link set eth0 up",
            "link set host0 up",
            f"address add {OWN}/32 dev eth0",
            "route add 169.254.1.1 dev eth0 scope link",
            "route add default via 169.254.1.1 dev eth0",
            *more,
        )
        namespaces, attachment = Namespaces(reactor), Attachment(Path("/run/netns") / self.space.name)
        network = await namespaces.read(attachment)
        await namespaces.join(attachment, self.tap, network.mtu)
        await self.serve(network, attachment)
        return network

    def inside(self, what: str) -> str:
        """Return what `ip` shows of the pod."""
        command = ["ip", "-n", self.pod.name, what, "show"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    async def told(self, client: tuple[str, Sequence[str]], reason: str) -> dict[str, str]:
        """Run a client and return what it tells its script."""
        self.client = await run_in_thread(
            reactor, Client, self.pod, Path(self.mktemp()), client[0], client[1]
        )
        self.addCleanup(self.client.end)
        await until(lambda: self.client.told(reason), f"a lease: {(self.client.said / '.log').read_text()}")
        return self.client.told(reason)

    async def networkd(self, config: str) -> None:
        """Run systemd-networkd in the pod. :param config: of its card."""
        directory = Path(self.mktemp()).absolute()
        directory.mkdir()
        (directory / "10.network").write_text(config)
        own = " && ".join(
            f"mkdir -p {each} && mount -t tmpfs -o mode=755 tmpfs {each}"
            for each in ("/run/systemd/netif", "/run/systemd/network")
        )
        # With /sys read-only, it does not wait for udev.
        line = (
            f"mount -o remount,ro /sys && {own} && cp {directory}/10.network /run/systemd/network && "
            "chown systemd-network /run/systemd/netif && exec /lib/systemd/systemd-networkd"
        )
        with (directory / "log").open("wb") as log:
            command = ["ip", "netns", "exec", self.pod.name, "sh", "-c", line]
            process = await run_in_thread(reactor, partial(subprocess.Popen, command, stdout=log, stderr=log))
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)


class BridgeTests(ClientCase):
    """On the bridge, closed by NetworkPolicies."""

    async def setUp(self) -> None:
        super().setUp()
        bridge = f"inf{secrets.token_hex(4)}"
        network, firewalls = Bridge(reactor, bridge, 1400), BridgeFirewalls(reactor, bridge)
        self.addCleanup(lambda: Deferred.fromCoroutine(network.remove()))
        self.addCleanup(lambda: Deferred.fromCoroutine(firewalls.remove()))
        await network.set_up(SUBNET, [])
        await firewalls.set_up({})
        await network.allow(self.pod.port)
        await network.join(self.pod.port)
        await self.serve(Network(self.pod.port.mac, f"{OWN}/24", NODE, 1400))

    async def test_busyboxs_gets_and_renews_it(self) -> None:
        found = await self.told(UDHCPC, "bound")
        self.check(found, "ip", "subnet", "router", "dns", "hostname", "search", "mtu")
        self.client.renew()
        await until(lambda: self.client.told("renew"), "a renewed lease")
        self.assertEqual(self.client.told("renew")["ip"], OWN)

    @needs_programs("dhclient")
    async def test_iscs_gets_it(self) -> None:
        found = await self.told(DHCLIENT, "BOUND")
        names = ("ip_address", "subnet_mask", "routers", "domain_name_servers", "host_name", "domain_search",
                 "interface_mtu")  # fmt: skip
        self.check(found, *(f"new_{each}" for each in names))

    @needs_programs("dhcpcd")
    async def test_dhcpcd_gets_it(self) -> None:
        found = await self.told(DHCPCD, "BOUND")
        names = ("ip_address", "subnet_mask", "routers", "domain_name_servers", "host_name", "domain_search",
                 "interface_mtu")  # fmt: skip
        self.check(found, *(f"new_{each}" for each in names))

    @needs_systemd
    async def test_systemds_gets_it(self) -> None:
        await self.networkd(_NETWORKD)
        await until(lambda: f"default via {NODE}" in self.inside("route"), "a route")
        self.assertIn(f"inet {OWN}/24", self.inside("address"))
        self.assertIn("mtu 1400", self.inside("link"))

    def check(self, found: dict[str, str], *names: str) -> None:
        """Check what a client was told, by its own words for address, mask, router, servers and so on."""
        values = [found[each].replace(". ", " ").rstrip(".") for each in names]
        if "subnet" in names:
            self.assertEqual(values[1], "255.255.255.0")
        self.assertEqual(values, [OWN, "255.255.255.0", NODE, "10.96.0.10 10.96.0.11", "web-0",
                                  " ".join(NAMES.searches), "1400"])  # fmt: skip


class CniTests(ClientCase):
    """In a CNI's network, with an address of its own alone and a router that is on no subnet."""

    async def setUp(self) -> None:
        super().setUp()
        await self.join_cni()

    async def test_busyboxs_gets_its_routes(self) -> None:
        found = await self.told(UDHCPC, "bound")
        self.assertEqual((found["ip"], found["subnet"]), (OWN, "255.255.255.255"))
        self.assertEqual(found["staticroutes"], "169.254.1.1/32 0.0.0.0 0.0.0.0/0 169.254.1.1")

    @needs_programs("dhcpcd")
    async def test_dhcpcd_has_its_routes(self) -> None:
        await self.told(DHCPCD, "BOUND")
        await until(lambda: "default via 169.254.1.1" in self.inside("route"), "its default route")
        self.assertIn("169.254.1.1 dev eth0", self.inside("route"))


@needs_programs("dhclient")
class SixthTests(ClientCase):
    """IPv6 in a CNI's network, whose router has an address of the link."""

    async def setUp(self) -> None:
        super().setUp()
        network = await self.join_cni(
            "address add fd00:4::7/128 dev eth0 nodad",
            "-6 route add default via fe80::ecee:eeff:feee:eeee dev eth0",
        )
        self.assertEqual(network.more, ("fd00:4::7/128",))

    async def routed(self) -> None:
        def routes() -> str:
            command = ["ip", "-n", self.pod.name, "-6", "route", "show", "default"]
            return subprocess.run(command, check=True, capture_output=True, text=True).stdout

        await until(lambda: "via fe80::ecee:eeff:feee:eeee" in routes(), "a router")

    async def test_the_kernel_takes_the_router_and_iscs_client_the_address(self) -> None:
        await self.routed()
        found = await self.told(DHCLIENT6, "BOUND6")
        self.assertEqual(found["new_ip6_address"], "fd00:4::7")
        self.assertEqual(found["new_dhcp6_name_servers"], "fd00:96::a")
        self.assertIn("shop.svc.cluster.local", found["new_dhcp6_domain_search"])

    @needs_systemd
    async def test_systemds_gets_both(self) -> None:
        await self.networkd(_NETWORKD.replace("DHCP=ipv4", "DHCP=yes").replace("=no", "=ipv6"))
        await until(lambda: "inet6 fd00:4::7/128" in self.inside("address"), "its address")
        await self.routed()
        await until(lambda: f"inet {OWN}/32" in self.inside("address"), "its address of IPv4")
