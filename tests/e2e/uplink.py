# SPDX-License-Identifier: Apache-2.0
"""A network namespace that reaches everything that this machine reaches, and whose networks can't collide
with others."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

from tests.e2e.pod_network import pod_network
from tests.e2e.qemu_case import said
from tests.support.spaces import Space

_RULES = """
table ip {table} {{
    chain out {{ type nat hook postrouting priority srcnat; ip saddr {inside} masquerade; }}
}}
"""


class Uplink:
    """A network namespace that sends with this machine's address. `end` removes it."""

    def __init__(self) -> None:
        number = pod_network().number
        outside, inside = f"10.84.{number}.1", f"10.84.{number}.2"
        link = f"infup{number}"
        rules = _RULES.format(table=link, inside=inside)
        with contextlib.ExitStack() as undo:
            self.space = Space("up")
            undo.callback(self.space.end)
            self.space.ip(f"link add eth0 type veth peer name {link} netns {os.getpid()}")
            undo.callback(said, "ip", "link", "delete", "dev", link)
            self.space.ip(f"address add {inside}/30 dev eth0", "link set eth0 up")
            said("ip", "address", "add", f"{outside}/30", "dev", link)
            said("ip", "link", "set", link, "up")
            self.space.ip(f"route add default via {outside}")
            subprocess.run(["nft", "--file", "-"], input=rules, check=True, capture_output=True, text=True)
            undo.callback(said, "nft", "delete", "table", "ip", link)
            Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
            self._undo = undo.pop_all()

    @property
    def path(self) -> Path:
        """The path of the namespace, by which programs enter it."""
        return Path("/run/netns") / self.space.name

    def end(self) -> None:
        """Remove it, with its link. Nothing may still run in it."""
        self._undo.close()
