# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.cluster.logind NAME`: as much of D-Bus and systemd-logind as kubelet uses.

NAME is the cluster's. A machine that is to be switched off stays up as long as any process holds a lock
("inhibitor"); kubelet does until it has ended its pods. SIGUSR1 announces that the machine is to be switched
off, SIGUSR2 that it no longer is. Sources: D-Bus Specification 0.41; org.freedesktop.login1(5)."""

from __future__ import annotations

import array
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingUnixStreamServer

from jeepney import (
    DBusAddress,
    HeaderFields,
    Message,
    MessageType,
    Parser,
    new_error,
    new_method_return,
    new_signal,
)

from infranetes_common.concurrency import replace_file
from tests.cluster.paths import Paths

NAME = "org.freedesktop.login1"
MANAGER = DBusAddress("/org/freedesktop/login1", NAME, f"{NAME}.Manager")
GUID = b"0123456789abcdef0123456789abcdef"
MAX_DELAY_SECONDS = 3600  # if kubelet needed more, it would change the machine's configuration
OFF, STAY = signal.SIGUSR1, signal.SIGUSR2


class Client(StreamRequestHandler):
    """A connection to the bus: first lines of text, then messages."""

    server: Logind
    rbufsize = 0  # unbuffered, so that reading a line does not read the messages after it

    def handle(self) -> None:
        if not self._introduced():
            return
        self._sending = threading.Lock()
        self._serial = 0
        parser = Parser()
        self.server.clients.add(self)
        try:
            while data := self.connection.recv(4096):
                for message in parser.feed(data):
                    if message.header.message_type is MessageType.method_call:
                        self._answer(message)
        finally:
            self.server.clients.discard(self)

    def _introduced(self) -> bool:
        """Handle the client's lines. Return whether it goes on to messages."""
        for line in self.rfile:
            match line.lstrip(b"\0").split():
                case [b"BEGIN"]:
                    return True
                case [b"AUTH", b"EXTERNAL", *_]:
                    said = b"OK " + GUID
                case [b"AUTH", *_]:
                    said = b"REJECTED EXTERNAL"
                case [b"NEGOTIATE_UNIX_FD"]:
                    said = b"AGREE_UNIX_FD"
                case _:
                    said = b"ERROR"
            self.connection.sendall(said + b"\r\n")
        return False

    def _answer(self, call: Message) -> None:
        member = call.header.fields[HeaderFields.member]
        match (member, call.body):
            case ("Hello", _):
                self.send(new_method_return(call, "s", (":1.1",)))
            case ("AddMatch", _):  # ignored, as every client gets every signal
                self.send(new_method_return(call))
            case ("Get", (_, "InhibitDelayMaxUSec")):
                self.send(new_method_return(call, "v", (("t", MAX_DELAY_SECONDS * 1_000_000),)))
            case ("Inhibit", ("shutdown", who, _, "delay")):
                held = self.server.lock(who)
                self.send(new_method_return(call, "h", (held,)))
                os.close(held)
            case _:
                name = "org.freedesktop.DBus.Error.UnknownMethod"
                self.send(new_error(call, name, "s", (f"there is no {member}{call.body}",)))

    def send(self, message: Message) -> None:
        """Send a message. May be called from any thread."""
        with self._sending:
            self._serial += 1
            descriptors = array.array("i")
            data = message.serialise(self._serial, fds=descriptors)
            socket.send_fds(self.connection, [data], descriptors)


class Logind(ThreadingUnixStreamServer):
    """The bus. `held`: the file with a line for each lock, which names its holder."""

    daemon_threads = True

    def __init__(self, bus: Path, held: Path) -> None:
        super().__init__(str(bus), Client)
        self.clients: set[Client] = set()
        self._held = held
        self._locks: list[str] = []
        self._changing = threading.Lock()
        self._change([])

    def lock(self, who: str) -> int:
        """Return the descriptor of a new lock, which is held until the last copy of that is closed."""
        kept, given = os.pipe2(os.O_CLOEXEC)
        with self._changing:
            self._change([*self._locks, who])
        threading.Thread(target=self._wait, args=(kept, who), daemon=True).start()
        return given

    def _wait(self, kept: int, who: str) -> None:
        os.read(kept, 1)  # nothing is ever written: it returns when the other end is closed
        os.close(kept)
        with self._changing:
            self._locks.remove(who)
            self._change(self._locks)

    def _change(self, locks: list[str]) -> None:
        self._locks = locks
        replace_file(self._held, "".join(f"{who}\n" for who in locks), durable=False)

    def tell(self, off: bool) -> None:
        """Tell all clients whether the machine is about to be switched off."""
        for client in list(self.clients):
            client.send(new_signal(MANAGER, "PrepareForShutdown", "b", (off,)))


def main(arguments: Sequence[str]) -> None:
    """Run the program."""
    (name,) = arguments
    paths = Paths(name)
    signal.pthread_sigmask(signal.SIG_BLOCK, (OFF, STAY))
    with Logind(paths.system_bus, paths.inhibitors) as logind:
        threading.Thread(target=logind.serve_forever, daemon=True).start()
        while True:
            logind.tell(signal.sigwait((OFF, STAY)) == OFF)


if __name__ == "__main__":
    main(sys.argv[1:])
