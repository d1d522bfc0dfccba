# SPDX-License-Identifier: Apache-2.0
"""Machines that are network namespaces, with cables between them."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from infranetes_common.network_namespaces import thd_in_namespace

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]
SECONDS = 30.0  # that an operation has to succeed


class Space:
    """A network namespace. `end` removes it, with its sockets and threads."""

    def __init__(self, word: str) -> None:
        self.name = f"inf{word}-{secrets.token_hex(4)}"
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        subprocess.run(["ip", "netns", "add", self.name], check=True, capture_output=True)
        self.ip("link set lo up")

    def end(self) -> None:
        """Close all sockets, wait for the threads, and remove the namespace."""
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in self._threads:
            thread.join()
        subprocess.run(["ip", "netns", "delete", self.name], check=True, capture_output=True)

    def ip(self, *commands: str) -> None:
        """Run the program `ip` in here, once with each of these argument strings."""
        for words in commands:
            subprocess.run(["ip", "-n", self.name, *words.split()], check=True, capture_output=True)

    def command(self, *words: str) -> list[str]:
        """Return the command line that runs a program in here."""
        return ["ip", "netns", "exec", self.name, *words]

    def said(self, *words: str) -> str:
        """Run a program in this network namespace, wait for it, and return its standard output."""
        return subprocess.run(self.command(*words), check=True, capture_output=True, text=True).stdout

    def python(self, script: str, *arguments: str) -> str:
        """Run a Python script in here, with the tree's packages importable, and return its output."""
        command = self.command(sys.executable, "-c", script, *arguments)
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def connect(self, other: Space, here: str, there: str) -> None:
        """Lay a cable to `other`, with its ends `here` and `there` up."""
        self.ip(f"link add {here} type veth peer name {there} netns {other.name}", f"link set {here} up")
        other.ip(f"link set {there} up")

    def inside(self, work: Callable[[], T]) -> T:
        """Call `work` in a thread that is in this namespace, and return its result."""
        return thd_in_namespace(self.name, work)

    def tell_callers(self, port: int) -> None:
        """Serve `port`: send each client the address that it comes from, then echo what it sends."""
        server = self.inside(lambda: socket.create_server(("0.0.0.0", port)))

        def connections() -> None:
            while True:
                try:
                    connection, peer = server.accept()
                except OSError:
                    return
                with connection, contextlib.suppress(OSError):
                    connection.settimeout(SECONDS)
                    connection.sendall(peer[0].encode() + b"\n")
                    while data := connection.recv(1 << 16):
                        connection.sendall(data)

        thread = threading.Thread(target=connections)
        self._sockets.append(server)
        self._threads.append(thread)
        thread.start()

    def listen(self, port: int) -> socket.socket:
        """Return a UDP socket that is bound to `port`."""
        listening = self.inside(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        self._sockets.append(listening)
        listening.settimeout(SECONDS)
        listening.bind(("0.0.0.0", port))
        return listening

    def send(self, data: bytes, source: str, address: str, port: int) -> None:
        """Send a datagram from an address of this machine."""

        def send() -> None:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
                sender.bind((source, 0))
                sender.sendto(data, (address, port))

        self.inside(send)

    def seen_as(
        self, address: str, port: int, source: str = "", sent: int = 0, seconds: float = SECONDS
    ) -> str:
        """Return the client's address as a server of `tell_callers` sees it; "": there is no answer.

        :param source: the address to connect from. :param sent: how many bytes are sent to be echoed."""

        def call() -> str:
            try:
                with socket.create_connection((address, port), seconds, (source, 0)) as connection:
                    stream = connection.makefile("rb")
                    told = stream.readline().decode().strip()
                    data = os.urandom(sent)
                    connection.sendall(data)
                    assert stream.read(sent) == data
                    return told
            except OSError:
                return ""

        return self.inside(call)
