# SPDX-License-Identifier: Apache-2.0
"""The nodes of a cluster: their names, addresses and files, and how a program is run on one of them.

All are in one network, and in the cluster's namespace of processes. The first has the control plane, and is
where the supervisor is; each further one has its own namespaces for the rest (`tests.cluster.neighbour`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import attrs

from tests.cluster.paths import ROOT, Paths

#: What a further node has of its own, of the kernel's.
NAMESPACES = ("--mount", "--ipc", "--net", "--uts")


def address_of(number: int) -> str:
    """The address of a node."""
    return f"10.97.0.{number}"


@attrs.frozen
class Node:
    """`number`: from 1."""

    cluster: Paths
    number: int = 1

    @property
    def first(self) -> bool:
        return self.number == 1

    @property
    def name(self) -> str:
        """Kubernetes' for it."""
        return "node" if self.first else f"node{self.number}"

    @property
    def address(self) -> str:
        return address_of(self.number)

    @property
    def place(self) -> Path:
        """Its files."""
        return self.cluster.place if self.first else self.cluster.place / self.name

    @property
    def cgroup(self) -> str:
        """In which kubelet has its pods'."""
        return self.cluster.id if self.first else f"{self.cluster.id}.{self.name}"

    def process(self, program: str) -> str:
        """What that program of this node is called among the cluster's: its log and pid have this name."""
        return program if self.first else f"{program}-{self.name}"

    def command(self, words: Sequence[str]) -> list[str]:
        """What runs that command here, where the supervisor is.

        :raise OSError: the node's namespaces are not there yet."""
        if self.first:
            return list(words)
        pid = self.cluster.pid(self.name).read_text()
        return ["nsenter", f"--target={pid}", *NAMESPACES, f"--wdns={ROOT}", "--", *words]
