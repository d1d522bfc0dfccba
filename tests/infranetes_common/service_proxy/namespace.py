# SPDX-License-Identifier: Apache-2.0
"""A network namespace for the service proxy, in which real connections are made."""

from __future__ import annotations

import contextlib
import select
import socket
import subprocess
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TypeVar

from infranetes_common.network_namespaces import thd_in_namespace
from tests.support import sctp

T = TypeVar("T")

#: A pod's network: the addresses 10.1.0.1 to .9 and fd01::1 to ::9, and an uplink on which nothing answers.
POD = (
    "link add pod0 type veth peer name pod1",
    "link set pod0 up",
    "link set pod1 up",
    "route add default dev pod0",
    "-6 route add default dev pod0",
    *(f"addr add 10.1.0.{number}/24 dev pod0" for number in range(1, 10)),
    *(f"addr add fd01::{number}/64 dev pod0 nodad" for number in range(1, 10)),
)


class Namespace:
    """A network namespace. `end` removes it.

    :param commands: arguments of `ip` that set up its network.
    """

    def __init__(self, commands: Iterable[str] = POD) -> None:
        self.name = f"infproxy-{uuid.uuid4().hex[:8]}"
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        subprocess.run(["ip", "netns", "add", self.name], check=True, capture_output=True)
        self.ip("link set lo up", *commands)

    def ip(self, *commands: str) -> None:
        """Run commands of `ip` in it."""
        for command in commands:
            subprocess.run(["ip", "-n", self.name, *command.split()], check=True, capture_output=True)

    def end(self) -> None:
        """Close all sockets and remove the namespace."""
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in self._threads:
            thread.join()
        subprocess.run(["ip", "netns", "del", self.name], check=True, capture_output=True)

    def inside(self, work: Callable[[], T]) -> T:
        """Run `work` in a thread inside this namespace. Return its result."""
        return thd_in_namespace(self.name, work)

    def serve(self, address: str, port: int, kind: int = socket.SOCK_STREAM) -> None:
        """Answer each connection or datagram with `address:port`."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        server = self.inside(lambda: socket.socket(family, kind))
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((address, port))
        answer = f"{address}:{port}".encode()

        def connections() -> None:
            server.listen(50)
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(answer)

        def datagrams() -> None:
            while True:
                try:
                    _, sender = server.recvfrom(100)
                except OSError:
                    return
                if not sender:
                    return
                server.sendto(answer, sender)

        thread = threading.Thread(target=connections if kind == socket.SOCK_STREAM else datagrams)
        self._sockets.append(server)
        self._threads.append(thread)
        thread.start()

    def reached(self, address: str, port: int, times: int = 1, seconds: float = 0.3) -> Counter[str]:
        """Count the answers to that many connections; those without one are `refused` or `dropped`."""

        def connect() -> str:
            try:
                with socket.create_connection((address, port), seconds) as connection:
                    connection.settimeout(20)
                    return connection.recv(100).decode()
            except ConnectionRefusedError:
                return "refused"
            except TimeoutError:
                return "dropped"

        return self.inside(lambda: Counter(connect() for _ in range(times)))

    def reached_by_sctp(self, address: str, port: int, times: int = 1) -> Counter[str]:
        """Count where the INITs of that many associations arrive in this namespace; `dropped` if nowhere."""

        def send() -> str:
            packet, tag = sctp.init(port)
            with (
                socket.socket(socket.AF_INET, socket.SOCK_RAW, sctp.PROTOCOL) as receiving,
                socket.socket(socket.AF_INET, socket.SOCK_RAW, sctp.PROTOCOL) as sending,
            ):
                sending.sendto(packet, (address, 0))
                while select.select([receiving], [], [], 0.3)[0]:
                    found = receiving.recv(2000)
                    if tag in found:
                        return f"{socket.inet_ntoa(found[16:20])}:{sctp.port(found[20:])}"
            return "dropped"

        return self.inside(lambda: Counter(send() for _ in range(times)))
