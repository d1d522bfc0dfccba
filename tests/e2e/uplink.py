# SPDX-License-Identifier: Apache-2.0
"""A network namespace that reaches everything that this machine reaches, and whose networks can't collide
with others."""

from __future__ import annotations

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
        outside, self._inside = f"10.84.{number}.1", f"10.84.{number}.2"
        self.space = Space("up")
        self._link = f"infup{number}"
        self.space.ip(
            f"link add eth0 type veth peer name {self._link} netns {os.getpid()}",
            f"address add {self._inside}/30 dev eth0",
            "link set eth0 up",
        )
        said("ip", "address", "add", f"{outside}/30", "dev", self._link)
        said("ip", "link", "set", self._link, "up")
        self.space.ip(f"route add default via {outside}")
        rules = _RULES.format(table=self._link, inside=self._inside)
        subprocess.run(["nft", "--file", "-"], input=rules, check=True, capture_output=True, text=True)
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")

    @property
    def path(self) -> Path:
        """The path of the namespace, by which programs enter it."""
        return Path("/run/netns") / self.space.name

    def end(self) -> None:
        """Remove it, with its link. Nothing may still run in it."""
        said("nft", "delete", "table", "ip", self._link)
        said("ip", "link", "delete", "dev", self._link)
        self.space.end()
