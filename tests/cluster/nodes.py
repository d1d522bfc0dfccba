# SPDX-License-Identifier: Apache-2.0
"""The nodes of a cluster: their names, addresses and files, and how a program is run on one of them.

All are in one network, and share the cluster's PID namespace. The control plane and the supervisor are on the
first node; each further node has its own namespaces for everything else (`tests.cluster.neighbour`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import attrs

from tests.cluster.paths import ROOT, Paths

#: The kernel's namespaces that each further node has of its own.
NAMESPACES = ("--mount", "--ipc", "--net", "--uts")


def address_of(number: int) -> str:
    """Return the address of the node with that number."""
    return f"10.97.0.{number}"


@attrs.frozen
class Node:
    """A node. `number`: counted from 1."""

    cluster: Paths
    number: int = 1

    @property
    def first(self) -> bool:
        return self.number == 1

    @property
    def name(self) -> str:
        """Its name in Kubernetes."""
        return "node" if self.first else f"node{self.number}"

    @property
    def address(self) -> str:
        return address_of(self.number)

    @property
    def place(self) -> Path:
        """The directory of its files."""
        return self.cluster.place if self.first else self.cluster.place / self.name

    @property
    def cgroup(self) -> str:
        """The control group in which its kubelet has those of its pods."""
        return self.cluster.id if self.first else f"{self.cluster.id}.{self.name}"

    def process(self, program: str) -> str:
        """Return the name of this node's process of that program, which its log and pid file also have."""
        return program if self.first else f"{program}-{self.name}"

    def command(self, words: Sequence[str]) -> list[str]:
        """Return the command line that runs a command on this node, from where the supervisor is.

        :raise OSError: the node's namespaces do not exist yet."""
        if self.first:
            return list(words)
        pid = self.cluster.pid(self.name).read_text()
        return ["nsenter", f"--target={pid}", *NAMESPACES, f"--wdns={ROOT}", "--", *words]
