# SPDX-License-Identifier: Apache-2.0
"""Debian's containerd, as the runtime of the cluster's kubelet or of the pods that are no VMs.

Images have the names that the daemon knows them by, and the registry's own, `images.DIRECT`.
"""

from __future__ import annotations

from pathlib import Path

from tests.cluster import images
from tests.cluster.components import NODE_SUBNET, Program
from tests.interop.critest_images import PAUSE
from tests.interop.critest_runtimes import Containerd
from tests.support import oci
from tests.support.registry import Registry


class Node(Containerd):
    """containerd, and a registry for the image that its sandboxes have.

    :ivar socket: the CRI's."""

    subnet = NODE_SUBNET

    def __init__(self, place: Path) -> None:
        super().__init__(place / "containerd")
        self.state = Path("/run/containerd")  # which a node that is switched off forgets
        self._sandboxes = Registry()

    def program(self) -> Program:
        """Starts the registry. What runs containerd."""
        self.root.mkdir(parents=True)
        self._sandboxes.start().push(*PAUSE, oci.busybox({"Cmd": ["sleep", "2147483647"]}))
        command, _ = self.command(self._sandboxes)
        self._lead("docker.io", images.DIRECT)
        self._lead(images.KUBERNETES_PREFIX, images.DIRECT, self._sandboxes.host)
        return Program("containerd", command, restarted=True)

    def _lead(self, registry: str, *hosts: str) -> None:
        """Have pulls from a registry go to these, one after the other, until one has the image."""
        directory = self.root / "hosts" / registry
        directory.mkdir(exist_ok=True)
        tables = (f'[host."http://{host}"]\ncapabilities = ["pull", "resolve"]' for host in hosts)
        (directory / "hosts.toml").write_text("\n".join(tables))

    def end(self) -> None:
        """End the registry; containerd is ended by whoever runs it."""
        self._sandboxes.stop()
