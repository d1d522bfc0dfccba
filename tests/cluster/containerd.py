# SPDX-License-Identifier: Apache-2.0
"""Debian's containerd as the runtime of the cluster's kubelet, to compare with; see `bench.ready`.

It knows busybox and debian by their registry's own name, `images.DIRECT`; the images of Kubernetes'
end-to-end suite by Kubernetes' name, as the daemon does.
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
        self._sandboxes = Registry()

    def program(self) -> Program:
        """Starts the registry. What runs containerd."""
        self.root.mkdir(parents=True)
        self._sandboxes.start().push(*PAUSE, oci.busybox({"Cmd": ["sleep", "2147483647"]}))
        command, _ = self.command(self._sandboxes)
        hosts = (images.DIRECT, self._sandboxes.host)
        (self.root / "hosts" / images.KUBERNETES_PREFIX / "hosts.toml").write_text(
            "\n".join(f'[host."http://{host}"]\ncapabilities = ["pull", "resolve"]' for host in hosts)
        )
        return Program("containerd", command)

    def end(self) -> None:
        """End the registry; containerd is ended by whoever runs it."""
        self._sandboxes.stop()
