# SPDX-License-Identifier: Apache-2.0
"""Instances without our agent: each has a console, a power button, and an SSH server if its user-data has
keys for one, as cloud-init would make it."""

from __future__ import annotations

import email
import re
from collections.abc import Callable
from typing import Any

import yaml
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall
from twisted.internet.threads import deferToThread

from infranetes.machines.agentless.ssh.keys import KeyPair
from tests.support.sshd import Sshd

OFF_SECONDS = 0.2
CONSOLE_BYTES = 100 << 10  # that Nova shows


class GuestInstances:
    """The instances without our agent of one test's cloud.

    :param off: called with each that powers itself off.
    :ivar images: of these instances. :ivar obeys: whether they power off when their power button is pressed.
    :ivar user_data: what each was told.
    :ivar consoles: what each has written to its console. :ivar pressed: whose power button was pressed.
    """

    def __init__(self, reactor: Any, off: Callable[[str], None]) -> None:
        self._reactor = reactor
        self._off = off
        self._timers: list[IDelayedCall] = []
        self._servers: dict[str, Sshd] = {}
        self._starting: list[Deferred[object]] = []
        self.images: set[str] = set()
        self.obeys = True
        self.user_data: dict[str, bytes] = {}
        self.consoles: dict[str, str] = {}
        self.pressed: list[str] = []

    def boot(self, id: str, address: str, user_data: bytes) -> None:
        """Boot an instance."""
        self.user_data[id] = user_data
        self.say(id, f"[    0.000000] Linux\nbooted with {len(user_data)} bytes of user-data\n")
        keys = keys_in(user_data)
        if keys is not None:
            server = self._servers[id] = Sshd(address=address, port=22)
            server.host_key, server.user_key = keys
            self._starting.append(deferToThread(server.start))

    def say(self, id: str, text: str) -> None:
        """Have an instance write to its console."""
        self.consoles[id] = self.consoles.get(id, "") + text

    def console(self, id: str, lines: int | None) -> str:
        """Return the end of what an instance has written."""
        text = self.consoles[id][-CONSOLE_BYTES:]
        return text if lines is None else "".join(text.splitlines(keepends=True)[-lines:])

    def press(self, id: str) -> None:
        """Press an instance's power button."""
        self.pressed.append(id)
        if self.obeys:
            self.say(id, "reboot: Power down\n")
            self._timers.append(self._reactor.callLater(OFF_SECONDS, self._off, id))

    def end(self, id: str) -> None:
        """End an instance's programs."""
        if (server := self._servers.pop(id, None)) is not None:
            self._starting.append(deferToThread(server.stop))

    async def stop(self) -> None:
        """End all of them."""
        for timer in self._timers:
            if timer.active():
                timer.cancel()
        for starting in self._starting:
            await starting
        for server in self._servers.values():
            await deferToThread(server.stop)


def keys_in(user_data: bytes) -> tuple[KeyPair, KeyPair] | None:
    """Return the host's key and a user's in user-data, as cloud-init finds them; None: there are none."""
    host, user = None, ""
    for part in email.message_from_bytes(user_data).walk():
        content = part.get_payload(decode=True)
        if not isinstance(content, bytes) or part.get_content_type() != "text/cloud-config":
            continue
        config = yaml.safe_load(content)
        if "ssh_keys" in config:
            pair = config["ssh_keys"]
            host = KeyPair(pair["ed25519_private"], pair["ed25519_public"])
        for script in config.get("bootcmd", []):
            found = re.search(r"ssh-ed25519 \S+ infranetes-node", script)
            user = found[0] if found else user
    return (host, KeyPair("", user)) if host and user else None
