# SPDX-License-Identifier: Apache-2.0
"""Debian's containerd as the runtime of the cluster's kubelet, to compare with; see `bench.ready`.

It knows the cluster's images by their registry's own name, `images.DIRECT`.
"""

from __future__ import annotations

from pathlib import Path

from tests.cluster.components import Program
from tests.interop.critest_images import PAUSE
from tests.interop.critest_runtimes import Containerd
from tests.support import oci
from tests.support.registry import Registry


class Node(Containerd):
    """containerd, and a registry for the image that its sandboxes have.

    :ivar socket: the CRI's."""

    def __init__(self, place: Path) -> None:
        super().__init__(place / "containerd")
        self._sandboxes = Registry()

    def program(self) -> Program:
        """Starts the registry. What runs containerd."""
        self.root.mkdir(parents=True)
        self._sandboxes.start().push(*PAUSE, oci.busybox({"Cmd": ["sleep", "2147483647"]}))
        command, _ = self.command(self._sandboxes)
        return Program("containerd", command)

    def end(self) -> None:
        """End the registry; containerd is ended by whoever runs it."""
        self._sandboxes.stop()
