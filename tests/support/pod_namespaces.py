# SPDX-License-Identifier: Apache-2.0
"""Network namespaces that stand for pods' VMs and other machines, and real packets between them."""

from __future__ import annotations

import contextlib
import secrets
import select
import socket
import struct
import subprocess
from collections.abc import Callable
from ipaddress import IPv4Address
from typing import Protocol, TypeVar

from infranetes.providers.qemu.network.bridge import BridgePort
from infranetes.providers.subnet import mac_of
from infranetes_common.identity import AGENT_MARK
from infranetes_common.network_namespaces import thd_in_namespace
from tests.support.frames import fragment
from tests.support.sctp import PROTOCOL
from tests.support.sctp import init as begin

T = TypeVar("T")
ARRIVES = 20.0  # seconds to wait for a packet that should arrive
DOES_NOT = (
    0.1  # and for one that should not: what isn't dropped is there when the system call that sends it ends
)


def ip(*arguments: str) -> None:
    """Run the program `ip`."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


class Machine:
    """A network namespace with one interface; `end` removes it.

    :param outer: the name of its interface's other end, in this namespace.
    :param gateway: the address through which it reaches other machines.
    """

    def __init__(self, outer: str, address: str, gateway: str, mac: str) -> None:
        self.address = address
        self.name = f"infpod-{secrets.token_hex(4)}"
        self._outer = outer
        self._sockets: list[socket.socket] = []
        ip("netns", "add", self.name)
        try:
            ip("link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", self.name)
            ip("-n", self.name, "link", "set", "lo", "up")
            ip("-n", self.name, "link", "set", "eth0", "address", mac, "up")
            ip("-n", self.name, "address", "add", f"{address}/24", "dev", "eth0")
            ip("link", "set", outer, "up")
            ip("-n", self.name, "route", "add", "default", "via", gateway)
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Close the sockets and remove the namespace, and its interface with it."""
        for each in self._sockets:
            each.close()
        # When a namespace is removed, its interfaces and the node's routes through them stay for a while.
        subprocess.run(["ip", "link", "del", self._outer], check=False, capture_output=True)
        subprocess.run(["ip", "netns", "del", self.name], check=False, capture_output=True)

    def socket(self, kind: int, protocol: int = 0) -> socket.socket:
        """Return a new socket of this machine, which `end` closes."""
        made = thd_in_namespace(self.name, lambda: socket.socket(socket.AF_INET, kind, protocol))
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        self._sockets.append(made)
        return made


class Pod(Machine):
    """A machine that stands for a VM: its outer end is named and addressed like a tap of the provider's."""

    def __init__(self, tap: str, address: str, gateway: str) -> None:
        self.port = BridgePort(tap, address)
        super().__init__(tap, address, gateway, mac_of(IPv4Address(address)))


class Node:
    """This namespace, as a machine.

    :param address: the address by which others reach it.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._sockets: list[socket.socket] = []

    def socket(self, kind: int, protocol: int = 0) -> socket.socket:
        """Return a new socket of this machine, which `end` closes."""
        made = socket.socket(socket.AF_INET, kind, protocol)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._sockets.append(made)
        return made

    def end(self) -> None:
        """Close the sockets."""
        for each in self._sockets:
            each.close()


class Daemon(Node):
    """The daemon, whose packets the node lets out to agents."""

    def socket(self, kind: int, protocol: int = 0) -> socket.socket:
        made = super().socket(kind, protocol)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, AGENT_MARK)
        return made


class Host(Protocol):
    """A machine that packets come from and go to, with sockets of its own."""

    address: str

    def socket(self, kind: int, protocol: int = 0) -> socket.socket:
        """Return a new socket of this machine, which is closed with it."""


def _ready(waiting: socket.socket, seconds: float) -> bool:
    return bool(select.select([waiting], [], [], seconds)[0])


def _send(sending: socket.socket, data: bytes, to: tuple[str, int]) -> None:
    with contextlib.suppress(PermissionError):  # raised if the machine's own firewall drops the packet
        sending.sendto(data, to)


# The functions and methods below block: call them in a thread. `expected` only determines how long they wait.


def tcp(client: Host, server: Host, port: int, expected: bool, to: str = "") -> Connection | None:
    """Connect the client to the server; None: it fails. :param to: an address other than the server's own."""
    listening = server.socket(socket.SOCK_STREAM)
    listening.bind(("0.0.0.0", port))
    listening.listen()
    connecting = client.socket(socket.SOCK_STREAM)
    connecting.settimeout(ARRIVES if expected else DOES_NOT)
    try:
        connecting.connect((to or server.address, port))
    except OSError:
        listening.close()
        connecting.close()
        return None
    accepted, _ = listening.accept()
    listening.close()
    return Connection(connecting, accepted)


class Connection:
    """A TCP connection and its two ends."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client = client
        self.server = server

    def carries(self, expected: bool, back: bool = False) -> bool:
        """Return whether data reaches the other end. :param back: send from the server to the client."""
        ends = (self.server, self.client) if back else (self.client, self.server)
        ends[0].sendall(b"x")
        if not _ready(ends[1], ARRIVES if expected else DOES_NOT):
            return False
        return bool(ends[1].recv(1000))

    def end(self) -> None:
        """Close both ends."""
        for each in (self.client, self.server):
            with contextlib.suppress(OSError):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            each.close()


class Datagrams:
    """Two UDP sockets that exchange datagrams, of which the client sends the first."""

    def __init__(self, client: Host, server: Host, port: int) -> None:
        self._client = client.socket(socket.SOCK_DGRAM)
        self._server = server.socket(socket.SOCK_DGRAM)
        self._server.bind((server.address, port))
        self.heard = ("", 0)  # the sender that the server answers

    def there(self, expected: bool) -> bool:
        """Return whether a datagram of the client's reaches the server."""
        _send(self._client, b"x", self._server.getsockname())
        if not _ready(self._server, ARRIVES if expected else DOES_NOT):
            return False
        _, self.heard = self._server.recvfrom(100)
        return True

    def back(self, expected: bool) -> bool:
        """Return whether a datagram of the server's reaches the client."""
        _send(self._server, b"x", self.heard)
        return _ready(self._client, ARRIVES if expected else DOES_NOT) and bool(self._client.recv(100))

    def end(self) -> None:
        """Close both."""
        self._client.close()
        self._server.close()


def udp(client: Host, server: Host, port: int, expected: bool, to: str = "") -> bool:
    """Return whether a datagram reaches the server. :param to: an address other than the server's own."""
    with client.socket(socket.SOCK_DGRAM) as sending, server.socket(socket.SOCK_DGRAM) as receiving:
        receiving.bind(("", port))
        _send(sending, b"x", (to or server.address, port))
        return _ready(receiving, ARRIVES if expected else DOES_NOT)


def refused(client: Host, server: Host, port: int, expected: bool) -> bool:
    """Return whether the client learns by ICMP that the server has no such port."""
    with client.socket(socket.SOCK_DGRAM) as sending:
        sending.connect((server.address, port))
        sending.settimeout(ARRIVES if expected else DOES_NOT)
        try:
            sending.send(b"x")
            sending.recv(100)
        except ConnectionRefusedError:
            return True
        except (TimeoutError, PermissionError):
            return False
        return False


def ping(client: Host, server: Host, expected: bool) -> bool:
    """Return whether the server answers the client's echo request."""
    word = secrets.token_bytes(8)
    body = struct.pack("!BBHHH", 8, 0, 0, 7, 1) + word
    total = sum(struct.unpack("!8H", body))
    total = (total >> 16) + (total & 0xFFFF)
    body = body[:2] + struct.pack("!H", total ^ 0xFFFF) + body[4:]
    with client.socket(socket.SOCK_RAW, socket.IPPROTO_ICMP) as sending:
        _send(sending, body, (server.address, 0))
        return comes(sending, lambda packet: packet[20] == 0 and word in packet, expected)


def fragments(client: Host, to: str, datagrams: int, pieces: int = 1, size: int = 1480) -> None:
    """Send the first fragments of datagrams that will never be whole, each with `size` bytes."""
    with client.socket(socket.SOCK_RAW, socket.IPPROTO_RAW) as sending:
        sending.bind((client.address, 0))
        for number in range(1, 1 + datagrams):
            for piece in range(pieces):
                _send(sending, fragment(client.address, to, number, piece * size, size), (to, 0))


def large(client: Host, server: Host, number: int, size: int = 4000) -> int:
    """Return how many datagrams of that many bytes arrive, of `number` that are sent after one another."""
    with client.socket(socket.SOCK_DGRAM) as sending, server.socket(socket.SOCK_DGRAM) as receiving:
        sending.bind((client.address, 0))
        receiving.bind(("", 0))
        for found in range(number):
            _send(sending, bytes(size), (server.address, receiving.getsockname()[1]))
            if not _ready(receiving, 1.0):
                return found
            receiving.recv(size)
    return number


def sctp(client: Host, server: Host, port: int, expected: bool) -> bool:
    """Return whether the first packet of an association reaches the server. No kernel needs SCTP for this."""
    packet, tag = begin(port)
    with (
        server.socket(socket.SOCK_RAW, PROTOCOL) as receiving,
        client.socket(socket.SOCK_RAW, PROTOCOL) as sending,
    ):
        _send(sending, packet, (server.address, 0))
        return comes(receiving, lambda found: tag in found, expected)


def comes(waiting: socket.socket, wanted: Callable[[bytes], bool], expected: bool) -> bool:
    """Return whether a packet comes."""
    while _ready(waiting, ARRIVES if expected else DOES_NOT):
        if wanted(waiting.recv(2000)):
            return True
    return False


def connects(client: Host, address: str, port: int, seconds: float, refused: bool = False) -> bool:
    """Return whether a TCP connection to this address can be made within `seconds`.

    :param refused: the result where the address answers that nothing listens there.
    """
    with client.socket(socket.SOCK_STREAM) as connecting:
        connecting.settimeout(seconds)
        try:
            connecting.connect((address, port))
        except ConnectionRefusedError:
            return refused
        except OSError:
            return False
        return True
