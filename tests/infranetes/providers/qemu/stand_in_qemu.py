#!/usr/bin/python3 -IS
# SPDX-License-Identifier: Apache-2.0
"""A program in QEMU's place: the same descriptors, monitor and identity port, and a guest in a few lines.

It runs as the user and with the files that QEMU gets, and refuses to start without one of them. What it does
not do is to execute anything: the provider's launches, ends and failures are tested with it in milliseconds.
It needs nothing but Debian's Python, because that user may enter no home directory. VMs that boot images are
real ones: their guests are a sector long.
"""

from __future__ import annotations

import array
import fcntl
import json
import os
import socket
import stat
import struct
import sys
import threading
import uuid
from typing import Any

RAM, STATE, DISK, KERNEL, INITRD, CONSOLE, TAP, QMP, IDENTITY = 3, 4, 5, 8, 9, 10, 11, 12, 13
SILENT = "silent"  # a file beside the program: while it is there, agents never answer to an identity
BY_PORT = "by-port"  # likewise: agents are called by their own ports
PORT = 4242  # where its agent says that it listens otherwise
QEMU = "/usr/bin/qemu-system-x86_64"
TUNGETIFF = 0x800454D2
REFUSED = b"what no QEMU takes"  # the beginning of a state
ANSWERS: dict[str, object] = {
    "query-version": {"qemu": {"major": 7, "minor": 2, "micro": 0}},
    "query-memory-size-summary": {"base-memory": 256 << 20},
    "query-memory-devices": [],
    "query-kvm": {"enabled": False},
    "query-hotpluggable-cpus": [],
    "query-fdsets": [],
}
GREETING = {"QMP": {"version": {"qemu": {"major": 7, "minor": 2, "micro": 0}}, "capabilities": []}}


class Guest:
    """The agent of a guest that boots at once."""

    def __init__(self) -> None:
        self.executes = threading.Event()
        self._listener = socket.socket(fileno=IDENTITY)

    def serve(self) -> None:
        """Ask each daemon that connects for the identity, take it, and later the time."""
        while True:
            connection, _ = self._listener.accept()
            with connection, connection.makefile("rw", encoding="utf-8") as lines:
                self.executes.wait()
                try:
                    lines.write("waiting\n")
                    lines.flush()
                    for line in lines:
                        lines.write(self.answer(line) + "\n")
                        lines.flush()
                except OSError:
                    continue  # the daemon has gone

    def answer(self, line: str) -> str:
        """Return what the agent says to a line."""
        place = os.path.dirname(sys.argv[0])
        ready = "ready 0" if os.path.exists(os.path.join(place, BY_PORT)) else f"ready {PORT}"
        if not line.startswith("{"):
            return ready  # to the time
        identity = json.loads(line)
        if "BEGIN CERTIFICATE" not in identity["certificate_pem"]:
            return "failed the certificate can't be read"
        if os.path.exists(os.path.join(place, SILENT)):
            threading.Event().wait()
        seen = {"sandbox_id": identity["sandbox_id"], "boot_id": str(uuid.uuid4())}
        os.write(CONSOLE, (json.dumps(seen) + "\n").encode())
        return ready


class Monitor:
    """The monitor: one client at a time."""

    def __init__(self, guest: Guest) -> None:
        self._guest = guest
        self._listener = socket.socket(fileno=QMP)
        self._client: socket.socket
        self._passed: list[int] = []
        self._migration = "completed"
        self._runs = False
        self._devices: list[str] = []

    def serve(self) -> None:
        """Serve one client after the other."""
        while True:
            self._client, _ = self._listener.accept()
            with self._client:
                self._send(GREETING)
                self._serve_client()

    def _serve_client(self) -> None:
        pending = b""
        while True:
            try:
                data, ancillary, _, _ = self._client.recvmsg(65536, socket.CMSG_SPACE(64))
            except ConnectionError:
                return
            if not data:
                return
            for _, kind, passed in ancillary:
                if kind == socket.SCM_RIGHTS:
                    self._passed += array.array("i", passed)
            *lines, pending = (pending + data).split(b"\n")
            for line in filter(bytes.strip, lines):
                command = json.loads(line)
                self._handle(command["execute"], command.get("arguments", {}), command["id"])

    def _handle(self, name: str, arguments: dict[str, Any], number: int) -> None:
        answer: object = {}
        if name == "cont":
            self._runs = True
            self._guest.executes.set()
        elif name == "query-migrate":
            answer = {"status": self._migration}
        elif name == "add-fd":
            answer = {"fdset-id": 20}
        elif name == "migrate":
            self._migrate()
        elif name == "migrate-continue":
            self._migration = "completed"
        elif name == "stop":
            self._runs = False
        elif name in ANSWERS:
            answer = ANSWERS[name]
        elif name == "query-status":
            answer = {"running": self._runs, "status": "running" if self._runs else "paused"}
        elif name == "query-named-block-nodes":
            answer = [{"node-name": "disk", "ro": False, "image": {"virtual-size": 20 << 30}}]
        elif name == "qom-list":
            answer = [{"name": each} for each in self._devices]
        self._send({"return": answer, "id": number})
        if name == "migrate-incoming":
            found = os.pread(STATE, len(REFUSED), 0)
            self._event("MIGRATION", status="failed" if found in (b"", REFUSED) else "completed")
            if found == REFUSED:
                os._exit(1)
        elif name == "block_resize":
            os.write(CONSOLE, (json.dumps({name: arguments["size"]}) + "\n").encode())
        elif name == "device_add":
            self._devices.append(arguments["id"])
            os.write(CONSOLE, (json.dumps({name: arguments["id"]}) + "\n").encode())
            self._event("ACPI_DEVICE_OST", info={"device": arguments["id"], "source": 1, "status": 0})
        elif name == "quit":
            self._event("SHUTDOWN", guest=False, reason="host-qmp-quit")
            os._exit(0)

    def _migrate(self) -> None:
        """Write a state; a pipe's gets its end with `migrate-continue`."""
        file = self._passed.pop()
        os.write(file, b"the state of a stand-in")
        if stat.S_ISFIFO(os.fstat(file).st_mode):
            self._migration = "pre-switchover"
        os.close(file)

    def _event(self, name: str, **data: object) -> None:
        self._send({"event": name, "data": data, "timestamp": {"seconds": 0, "microseconds": 0}})

    def _send(self, message: object) -> None:
        self._client.sendall(json.dumps(message).encode() + b"\r\n")


def check_files() -> None:
    """End unless it has the descriptors that QEMU could not do without."""
    needed = {"memory": RAM, "disk": DISK, "console": CONSOLE}
    needed |= {"state": STATE} if "-incoming" in sys.argv else {"kernel": KERNEL, "initrd": INITRD}
    for name, number in needed.items():
        try:
            readable = stat.S_ISREG(os.fstat(number).st_mode) or name == "state"
        except OSError:
            readable = False
        if not readable:
            sys.exit(f"stand-in: no {name}")
    try:
        fcntl.ioctl(TAP, TUNGETIFF, struct.pack("16sH14x", b"", 0))
    except OSError:
        sys.exit("stand-in: no tap")


def main() -> None:
    """Be QEMU."""
    if sys.argv[1:] == ["--version"]:
        print("QEMU emulator version 7.2.0 (a stand-in)")
        return
    if "-action" in sys.argv or "help" in sys.argv:  # a VM that boots an image is QEMU's
        os.execv(QEMU, [QEMU, *sys.argv[1:]])  # noqa: S606
    check_files()
    guest = Guest()
    threading.Thread(target=guest.serve, daemon=True).start()
    Monitor(guest).serve()


if __name__ == "__main__":
    main()
