# SPDX-License-Identifier: Apache-2.0
"""Notifications to the service manager, systemd's sd_notify(3)."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable

from twisted.logger import Logger

from infranetes_common.redaction import redacted_beginning

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
    """Notifies the service manager of the daemon's state.

    `systemctl status` shows one line: what the daemon does and, until a reload succeeds, why the last one was
    refused.
    """

    def __init__(self, send: Callable[[str], None] = send) -> None:
        self._send = send
        self._ready = self._reloading = False
        self._status = "starting"
        self._refusal = ""

    def ready(self, status: str) -> None:
        """Report that the daemon serves. `status` is what `systemctl status` shows."""
        self._ready = True
        self._status = _one_line(status, MAX_STATUS)
        self._send(self._state())

    def progress(self, words: str) -> None:
        """Report that the start goes on and needs more time."""
        self._status = _one_line(words)
        self._send(f"{self._state()}\nEXTEND_TIMEOUT_USEC={PROGRESS_SECONDS * 1_000_000}")

    def reloading(self) -> None:
        """Report that the configuration is being read again; `reloaded` reports when that is done.

        To the service manager, a daemon that is not ready yet is still starting, and can't reload."""
        if self._ready:
            self._reloading = True
            now = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
            self._send(f"RELOADING=1\nMONOTONIC_USEC={now}")

    def reloaded(self, refusal: str = "") -> None:
        """Report the end of a reload. The status is otherwise as before.

        :param refusal: why the reload changed nothing; "": it succeeded."""
        self._reloading = False
        self._refusal = _one_line(refusal, MAX_STATUS)
        self._send(self._state())

    def stopping(self) -> None:
        """Report that the daemon stops."""
        self._send("STOPPING=1")

    def _state(self) -> str:
        refused = f"; the configuration was not reloaded: {self._refusal}" if self._refusal else ""
        ready = "READY=1\n" if self._ready and not self._reloading else ""  # it would end the reload
        return f"{ready}STATUS={self._status}{refused}"


def _one_line(words: str, most: int = 200) -> str:
    """Return words as a line without secrets: every local user may read a status."""
    return redacted_beginning(words, most).replace("\n", " ")[:most]
