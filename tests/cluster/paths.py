# SPDX-License-Identifier: Apache-2.0
"""Where a cluster has its files. Two checkouts, and a person's cluster and the tests', don't meet."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import attrs

ROOT = Path(__file__).resolve().parents[2]

#: Kept from one cluster to the next: making a template takes minutes.
TEMPLATES = Path("/var/lib/infranetes/cluster-templates")
REGISTRY = ROOT / "build" / "cluster" / "registry"

#: Of Kubernetes and of what a cluster has beside it. Another release's are made by `tests/cluster/tools`.
RELEASE = os.environ.get("INFRANETES_TEST_KUBERNETES", "")
PROGRAMS = ROOT / "build" / "tools" / (f"kubernetes-{RELEASE}" if RELEASE else "kubernetes")


@attrs.frozen
class Paths:
    """Of the cluster called `name`."""

    name: str

    @property
    def id(self) -> str:
        """What it is called on this machine: its files, and its control group."""
        checkout = hashlib.sha256(str(ROOT).encode()).hexdigest()[:6]
        return f"infranetes-cluster-{checkout}-{self.name}"

    @property
    def place(self) -> Path:
        """All that there is while it runs, and not afterwards."""
        return Path("/var/tmp") / self.id

    @property
    def kept(self) -> Path:
        """What a person uses it with, and the logs of the last one."""
        return ROOT / "build" / "cluster" / self.name

    @property
    def logs(self) -> Path:
        return self.kept / "logs"

    @property
    def kubectl(self) -> Path:
        """A script: kubectl, as the cluster's administrator."""
        return self.kept / "kubectl"

    @property
    def inside(self) -> Path:
        """A script that runs a command where the first node is."""
        return self.kept / "inside"

    def inside_of(self, node: str) -> Path:
        """A script that runs a command where that other node is."""
        return self.kept / f"inside-{node}"

    def scripts(self) -> list[Path]:
        """Those that there are."""
        return [*self.kept.glob(self.kubectl.name), *self.kept.glob(f"{self.inside.name}*")]

    def pid(self, program: str) -> Path:
        """The file with the number of that program's process, as it is inside."""
        return self.place / f"{program}.pid"

    @property
    def off(self) -> Path:
        """A file; while it is there, no program is started again."""
        return self.place / "off"

    def stopped(self, program: str) -> Path:
        """A file; while it is there, that program is not started again."""
        return self.place / f"{program}.stopped"

    @property
    def ssh_key(self) -> Path:
        """Whoever has it may run commands on the first node; see `tests.cluster.sshd`."""
        return self.place / "ssh" / "key"

    @property
    def system_bus(self) -> Path:
        """The socket of the first machine's D-Bus."""
        return self.place / "system_bus"

    @property
    def inhibitors(self) -> Path:
        """A file with a line for each who keeps the first machine from being switched off."""
        return self.place / "inhibitors"

    @property
    def shared(self) -> Path:
        """A directory for hostPath volumes."""
        return self.place / "shared"
