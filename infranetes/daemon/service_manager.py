# SPDX-License-Identifier: Apache-2.0
"""Notifications to the service manager, systemd's sd_notify(3)."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable

from twisted.logger import Logger

PROGRESS_SECONDS = 120  # how long systemd waits for a start's next sign of progress after each
MAX_STATUS = 500  # characters

_log = Logger()


def send(assignments: str) -> None:
    """Send assignments, as NAME=VALUE lines, to the service manager if there is one."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as manager:
            manager.setblocking(False)
            manager.sendto(assignments.encode(), address)
    except OSError as error:
        _log.debug("the service manager could not be notified: {error}", error=error)


class ServiceManager:
    """Notifies the service manager of the daemon's state."""

    def __init__(self, send: Callable[[str], None] = send) -> None:
        self._send = send

    def ready(self, status: str) -> None:
        """Report that the daemon serves. `status` is what `systemctl status` shows."""
        self._send(f"READY=1\nSTATUS={_one_line(status, MAX_STATUS)}")

    def progress(self, words: str) -> None:
        """Report that the start goes on and needs more time."""
        self._send(f"STATUS={_one_line(words)}\nEXTEND_TIMEOUT_USEC={PROGRESS_SECONDS * 1_000_000}")

    def reloading(self) -> None:
        """Report that the configuration is being read again; `ready` reports when that is done."""
        now = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self._send(f"RELOADING=1\nMONOTONIC_USEC={now}")

    def stopping(self) -> None:
        """Report that the daemon stops."""
        self._send("STOPPING=1")


def _one_line(words: str, most: int = 200) -> str:
    return words.replace("\n", " ")[:most]
