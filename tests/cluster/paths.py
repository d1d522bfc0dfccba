# SPDX-License-Identifier: Apache-2.0
"""A cluster's files. Clusters of two checkouts, and a person's and the tests', do not share any."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import attrs

ROOT = Path(__file__).resolve().parents[2]

#: Templates are kept from one cluster to the next, because making one takes minutes.
TEMPLATES = Path("/var/lib/infranetes/cluster-templates")
REGISTRY = ROOT / "build" / "cluster" / "registry"

#: Kubernetes' release. The programs of a release other than the default are made by `tests/cluster/tools`.
RELEASE = os.environ.get("INFRANETES_TEST_KUBERNETES", "")
PROGRAMS = ROOT / "build" / "tools" / (f"kubernetes-{RELEASE}" if RELEASE else "kubernetes")


@attrs.frozen
class Paths:
    """The paths of the cluster called `name`."""

    name: str

    @property
    def id(self) -> str:
        """The name that its files and its control group have on this machine."""
        checkout = hashlib.sha256(str(ROOT).encode()).hexdigest()[:6]
        return f"infranetes-cluster-{checkout}-{self.name}"

    @property
    def place(self) -> Path:
        """The directory of files that exist only while it runs."""
        return Path("/var/tmp") / self.id

    @property
    def kept(self) -> Path:
        """The directory of the scripts to use it, and of the last cluster's logs."""
        return ROOT / "build" / "cluster" / self.name

    @property
    def logs(self) -> Path:
        return self.kept / "logs"

    @property
    def kubectl(self) -> Path:
        """A script that runs kubectl as the cluster's administrator."""
        return self.kept / "kubectl"

    @property
    def inside(self) -> Path:
        """A script that runs a command on the first node."""
        return self.kept / "inside"

    def inside_of(self, node: str) -> Path:
        """A script that runs a command on another node."""
        return self.kept / f"inside-{node}"

    def scripts(self) -> list[Path]:
        """The scripts that exist."""
        return [*self.kept.glob(self.kubectl.name), *self.kept.glob(f"{self.inside.name}*")]

    def pid(self, program: str) -> Path:
        """The file with the process id of that program, in the cluster's PID namespace."""
        return self.place / f"{program}.pid"

    @property
    def off(self) -> Path:
        """A file; while it exists, no program is started again."""
        return self.place / "off"

    def stopped(self, program: str) -> Path:
        """A file; while it exists, that program is not started again."""
        return self.place / f"{program}.stopped"

    @property
    def ssh_key(self) -> Path:
        """The key that lets its owner run commands on the first node; see `tests.cluster.sshd`."""
        return self.place / "ssh" / "key"

    @property
    def system_bus(self) -> Path:
        """The socket of the first node's D-Bus."""
        return self.place / "system_bus"

    @property
    def inhibitors(self) -> Path:
        """A file with a line for each lock that keeps the first node's machine from being switched off."""
        return self.place / "inhibitors"

    @property
    def shared(self) -> Path:
        """A directory for hostPath volumes."""
        return self.place / "shared"
