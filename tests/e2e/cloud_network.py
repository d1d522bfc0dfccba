# SPDX-License-Identifier: Apache-2.0
"""A network like a cloud's, for one machine: DHCP with an MTU and leases, router, metadata, time server."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path
from typing import Any, cast

from twisted.internet.defer import maybeDeferred
from twisted.internet.interfaces import IListeningPort, IReactorSocket
from twisted.web.resource import Resource

from infranetes_common.reactors import installed
from tests.e2e.pod_network import pod_network
from tests.support.clouds.http_sites import ClosableSite
from tests.support.clouds.ntp import PORT as NTP
from tests.support.clouds.ntp import NtpServer
from tests.support.spaces import Space

METADATA = "169.254.169.254"
MAC = "52:54:00:c1:0d:01"
LEASE_SECONDS = 120  # the shortest that dnsmasq allows
TAP = "tap0"
END_TOO = ("setpriv", "--pdeathsig", "KILL")  # a prefix with which a command ends when this process does
_HOPS = 1  # the metadata service's answers reach the machine itself, and nothing behind it

reactor = cast(IReactorSocket, installed())


class CloudNetwork:
    """A network in a namespace of its own, connected to the host by a veth cable only.

    :param mtu: the network's MTU. :param lone: whether the machine's address comes without a subnet, as on
        Compute Engine, so that everything goes through the router.
    :param time: the address of a time server that DHCP announces; "": none.
    """

    def __init__(self, directory: Path, *, mtu: int, lone: bool, time: str = "") -> None:
        self._net = pod_network()
        self._leases = directory / "leases"
        self.log = directory / "dnsmasq.log"
        self.address = self._net.node.removesuffix(".1") + ".10"
        self._router = self._net.node.removesuffix(".1") + ".2"
        self._sites: list[tuple[ClosableSite, IListeningPort]] = []
        self._time_servers: list[IListeningPort] = []
        self.space = Space("cloud")
        self._lay_out()
        self._dhcp = self._start_dhcp(mtu, lone, time)

    def _lay_out(self) -> None:
        bridge = self._net.bridge
        # A process that was killed may have left the bridge, whose name is now this process's.
        subprocess.run(["ip", "link", "delete", bridge], check=False, capture_output=True)
        self.space.ip(
            "link add br0 type bridge",
            "link set br0 up",
            f"addr add {self._router}/24 dev br0",
            f"addr add {METADATA}/32 dev br0",
            f"tuntap add {TAP} mode tap",
            f"link set {TAP} master br0 up",
            f"link add node type veth peer name {bridge} netns 1",
            "link set node master br0 up",
        )
        for command in (f"addr add {self._net.node}/24 dev {bridge}", f"link set {bridge} up"):
            subprocess.run(["ip", *command.split()], check=True)
        self.space.said("sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv4.conf.all.send_redirects=0")

    def _start_dhcp(self, mtu: int, lone: bool, time: str) -> subprocess.Popen[bytes]:
        options = [f"option:mtu,{mtu}", f"option:router,{self._router}", f"option:dns-server,{METADATA}"]
        if lone:
            routes = f"{self._router}/32,0.0.0.0,0.0.0.0/0,{self._router}"
            options += ["option:netmask,255.255.255.255", f"option:classless-static-route,{routes}"]
        if time:
            options.append(f"option:ntp-server,{time}")
        network = self._net.node.removesuffix(".1") + ".0"
        command = self.space.command(
            "dnsmasq",
            "--keep-in-foreground",
            "--conf-file=/dev/null",
            "--user=root",
            "--port=0",
            "--interface=br0",
            "--except-interface=lo",
            "--bind-interfaces",
            "--no-ping",
            "--log-facility=-",
            "--pid-file=",
            "--dhcp-authoritative",
            f"--dhcp-leasefile={self._leases}",
            f"--dhcp-range={network},static,255.255.255.0,{LEASE_SECONDS}",
            f"--dhcp-host={MAC},{self.address}",
            *(f"--dhcp-option={option}" for option in options),
        )
        with self.log.open("wb") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def leased(self) -> bool:
        """Return whether the machine has got its address."""
        return self._leases.exists() and self.address in self._leases.read_text()

    def serve_metadata(self, resource: Resource) -> None:
        """Serve `resource` at the metadata service's address."""

        def listening() -> socket.socket:
            made = socket.create_server((METADATA, 80))
            made.setsockopt(socket.IPPROTO_IP, socket.IP_TTL, _HOPS)
            made.setblocking(False)
            return made

        site: Any = ClosableSite(resource)  # Any: it wraps a server factory, but is not typed as one
        with self.space.inside(listening) as listener:
            port = reactor.adoptStreamPort(listener.fileno(), socket.AF_INET, site)
        self._sites.append((site, port))

    def serve_time(self, address: str) -> NtpServer:
        """Serve the time at an address from now on."""

        def listening() -> socket.socket:
            made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            made.bind((address, NTP))
            made.setblocking(False)
            return made

        if address != METADATA:
            self.space.ip(f"addr add {address}/32 dev br0")
        server = NtpServer()
        with self.space.inside(listening) as listener:
            port = reactor.adoptDatagramPort(listener.fileno(), socket.AF_INET, server, 1 << 13)
        self._time_servers.append(port)
        return server

    async def end(self) -> None:
        """Remove the network. Its users must have ended."""
        for port in self._time_servers:
            await maybeDeferred(port.stopListening)
        for site, port in self._sites:
            await site.close_connections()
            await maybeDeferred(port.stopListening)
        self._dhcp.terminate()
        self._dhcp.wait()
        self.space.end()
