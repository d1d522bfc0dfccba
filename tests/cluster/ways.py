# SPDX-License-Identifier: Apache-2.0
"""The ways of a pod's packets to Services, in network namespaces, and where the packets end.

pod ──▶ beyond             a VM's way: the rules are in the pod's own namespace
pod ──▶ node ──▶ beyond    a pod's way with kube-proxy: the rules are in the node's namespace

`beyond` has every address. It, and the pod itself, answer each packet with the destination address and port
that the packet has on arrival. So silence only means that a packet was dropped.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import TypeVar

import attrs

from tests.infranetes_common.service_proxy.namespace import Namespace

T = TypeVar("T")
POD, POD6 = "10.1.0.9", "fd01::9"
NODE, NODE6 = "172.16.0.1", "fd02::1"
PORTS = (80, 81, 443, 8080, 8081, 30080)  # the ports that are answered, over TCP and UDP
SILENCE = 0.3  # seconds without any answer after which the packets still unanswered count as dropped
DROPPED, REFUSED = "dropped", "refused"
ALL_AT_ONCE = 250  # sockets
# ICMP reports what is refused; without these settings the kernel limits its rate.
SETTINGS = {
    "net/ipv4/icmp_ratemask": "0",
    "net/ipv4/icmp_ratelimit": "0",
    "net/ipv6/icmp/ratelimit": "0",
    "net/ipv4/ip_forward": "1",
    "net/ipv6/conf/all/forwarding": "1",
}
_ANSWERS = ("route add local 0.0.0.0/0 dev lo table main", "-6 route add local ::/0 dev lo table main")
_PKTINFO = {
    socket.AF_INET: (socket.IPPROTO_IP, getattr(socket, "IP_PKTINFO", 8)),
    socket.AF_INET6: (socket.IPPROTO_IPV6, socket.IPV6_RECVPKTINFO),
}
_RECVERR = {socket.AF_INET: (socket.IPPROTO_IP, 11), socket.AF_INET6: (socket.IPPROTO_IPV6, 25)}
_RESET = struct.pack("ii", 1, 0)


@attrs.frozen(order=True)
class Destination:
    """A destination of a pod's packets. `protocol` is TCP or UDP."""

    address: str
    protocol: str
    port: int

    def __str__(self) -> str:
        return f"{self.address} {self.protocol} {self.port}"


class Way:
    """A pod and everything beyond it. `end` it."""

    def __init__(self, through_node: bool) -> None:
        self.pod = Namespace(())
        self.beyond = Namespace(())
        self.node = Namespace(()) if through_node else None
        for space in self._spaces:
            space.inside(_set_up)
        if self.node is None:
            _connect(self.pod, self.beyond, "10.1.0.1/24", "fd01::1/64")
        else:
            _connect(self.pod, self.node, "10.1.0.1/24", "fd01::1/64")
            self.node.ip(
                f"link add out type veth peer name in netns {self.beyond.name}",
                "link set out up",
                f"addr add {NODE}/24 dev out",
                f"addr add {NODE6}/64 dev out nodad",
            )
            self.beyond.ip(
                "link set in up",
                "addr add 172.16.0.2/24 dev in",
                "addr add fd02::2/64 dev in nodad",
                f"route add 10.1.0.0/24 via {NODE}",
                f"-6 route add fd01::/64 via {NODE6}",
            )
            self.node.ip("route add default via 172.16.0.2", "-6 route add default via fd02::2")
        self.beyond.ip(*_ANSWERS)
        self._answering = Answering((self.pod, self.beyond))

    @property
    def _spaces(self) -> list[Namespace]:
        return [each for each in (self.pod, self.node, self.beyond) if each is not None]

    @property
    def rules(self) -> Namespace:
        """The namespace of the rules."""
        return self.node or self.pod

    def forget_flows(self) -> None:
        """Make the kernel forget all connections, because their ports are used again."""
        for space in (self.pod, self.rules):
            command = ["ip", "netns", "exec", space.name, "conntrack", "--flush"]
            subprocess.run(command, check=True, capture_output=True)

    def reached(self, wanted: Sequence[Destination], silence: float = SILENCE) -> list[str]:
        """Send a packet to each; return the `address:port` that answers, REFUSED, DROPPED or an error."""
        found: list[str] = []
        for start in range(0, len(wanted), ALL_AT_ONCE):
            found += self.pod.inside(partial(_asked, wanted[start : start + ALL_AT_ONCE], silence))
        return found

    def end(self) -> None:
        self._answering.end()
        for space in self._spaces:
            space.end()


def _set_up() -> None:
    for name, value in SETTINGS.items():
        (Path("/proc/sys") / name).write_text(value)


def _connect(pod: Namespace, to: Namespace, address: str, address6: str) -> None:
    pod.ip(
        f"link add eth0 type veth peer name pod0 netns {to.name}",
        "link set eth0 up",
        f"addr add {POD}/24 dev eth0",
        f"addr add {POD6}/64 dev eth0 nodad",
    )
    to.ip("link set pod0 up", f"addr add {address} dev pod0", f"addr add {address6} dev pod0 nodad")
    pod.ip(
        f"route add default via {ip_address(address.partition('/')[0])}",
        f"-6 route add default via {ip_address(address6.partition('/')[0])}",
    )


class Answering:
    """Answers connections and datagrams in some namespaces with the address that they came to. `end` it."""

    def __init__(self, spaces: Sequence[Namespace]) -> None:
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        for space in spaces:
            for each in space.inside(_listening):
                work = _accept if each.type == socket.SOCK_STREAM else _answer
                self._selector.register(each, selectors.EVENT_READ, partial(work, each))
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    return
                work: Callable[[], None] = key.data
                work()

    def end(self) -> None:
        self._wake.send(b"!")
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._wake.close()
        self._selector.close()


def _listening() -> list[socket.socket]:
    return [
        _listen(family, kind, port)
        for family in (socket.AF_INET, socket.AF_INET6)
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM)
        for port in PORTS
    ]


def _listen(family: socket.AddressFamily, kind: socket.SocketKind, port: int) -> socket.socket:
    made = socket.socket(family, kind)
    made.setblocking(False)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    if kind == socket.SOCK_DGRAM:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        made.setsockopt(*_PKTINFO[family], 1)
    made.bind(("", port))
    if kind == socket.SOCK_STREAM:
        made.listen(1024)
    return made


def _accept(listening: socket.socket) -> None:
    try:
        connection, _ = listening.accept()
    except OSError:  # the client is gone already
        return
    with connection:
        address, port = connection.getsockname()[:2]
        connection.send(f"{address}:{port}".encode())


def _answer(listening: socket.socket) -> None:
    try:
        _, about, _, sender = listening.recvmsg(100, 100)
        ((level, kind, info),) = about
        at = slice(8, 12) if listening.family == socket.AF_INET else slice(0, 16)
        told = f"{ip_address(info[at])}:{listening.getsockname()[1]}".encode()
        anywhere = bytes(4) + info[4:] if at.start else info[:16] + bytes(4)  # by any interface
        listening.sendmsg([told], [(level, kind, anywhere)], 0, sender)
    except OSError:  # the sender is gone already
        return


def _asked(wanted: Sequence[Destination], silence: float) -> list[str]:
    answers = [DROPPED] * len(wanted)
    with selectors.DefaultSelector() as waiting:
        for number, destination in enumerate(wanted):
            try:
                waiting.register(_sent(destination), selectors.EVENT_READ, number)
            except OSError as error:
                answers[number] = _outcome(error)
        until = time.monotonic() + silence
        while waiting.get_map() and time.monotonic() < until:
            for key, _ in waiting.select(max(until - time.monotonic(), 0)):
                asking = key.fileobj
                assert isinstance(asking, socket.socket)
                try:
                    answers[key.data] = asking.recv(100).decode()
                except BlockingIOError:  # woken by an ICMP error
                    answers[key.data] = REFUSED
                except OSError as error:
                    answers[key.data] = _outcome(error)
                waiting.unregister(asking)
                asking.close()
                until = time.monotonic() + silence
        for key in list(waiting.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
    return answers


def _sent(destination: Destination) -> socket.socket:
    """Send a packet, and return its socket, which becomes readable once there is an answer."""
    family = socket.AF_INET6 if ":" in destination.address else socket.AF_INET
    asking = socket.socket(family, socket.SOCK_STREAM if destination.protocol == "TCP" else socket.SOCK_DGRAM)
    try:
        asking.setblocking(False)
        if destination.protocol == "TCP":
            asking.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)  # leave no TIME-WAIT behind
            asking.setsockopt(*_RECVERR[family], 1)  # report ICMP errors now, not after another attempt
            with contextlib.suppress(BlockingIOError):
                asking.connect((destination.address, destination.port))
        else:
            asking.connect((destination.address, destination.port))
            with contextlib.suppress(
                PermissionError
            ):  # what is not let out; if it is refused, that is told too
                asking.send(b"?")
    except OSError:
        asking.close()
        raise
    return asking


def _outcome(error: OSError) -> str:
    return REFUSED if isinstance(error, ConnectionRefusedError) else type(error).__name__


def sets(destinations: Sequence[Destination], answers: Sequence[str]) -> Mapping[Destination, frozenset[str]]:
    """Return all answers for each destination."""
    found: dict[Destination, set[str]] = {}
    for destination, answer in zip(destinations, answers, strict=True):
        found.setdefault(destination, set()).add(answer)
    return {destination: frozenset(its) for destination, its in found.items()}
