# SPDX-License-Identifier: Apache-2.0
"""Debian's containerd, as the runtime of the cluster's kubelet or of the pods that are not VMs.

Images have the names that the daemon knows them by, and the registry's own, `images.DIRECT`. A second
registry, `PRIVATE`, uses TLS and requires a password.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.cluster import images
from tests.cluster.components import NODE_SUBNET, QUICK_START, Program
from tests.interop.critest_images import PAUSE
from tests.interop.critest_runtimes import Containerd
from tests.support import oci
from tests.support.registry import Registry

#: The account of the private registry.
USER, PASSWORD = "somebody", "his password"
PRIVATE_PORT = 5002
PRIVATE = f"127.0.0.1:{PRIVATE_PORT}"


def private_registry(place: Path) -> Path:
    """Return the content's directory of the private registry of the cluster whose files are in `place`."""
    return place / "private" / "data"


class Node(Containerd):
    """containerd, a registry for its sandboxes' image, and the private registry.

    :ivar socket: containerd's CRI socket."""

    subnet = NODE_SUBNET
    conflist = QUICK_START / "cni/net.d/10-pods.conflist"

    def __init__(self, place: Path) -> None:
        super().__init__(place / "containerd")
        self.state = Path("/run/containerd")  # below /run, which a node loses when it is switched off
        self._sandboxes = Registry(root=place / "sandbox-registry")
        root = private_registry(place).parent
        self._private = Registry(user=USER, password=PASSWORD, tls=True, root=root, port=PRIVATE_PORT)

    def program(self) -> Program:
        """Start the registries, and return containerd's program."""
        self.root.mkdir(parents=True)
        self._sandboxes.root.mkdir()
        (self._private.root / "data").mkdir(parents=True)
        self._private.start()
        self._sandboxes.start().push(*PAUSE, oci.busybox({"Cmd": ["sleep", "2147483647"]}))
        command, _ = self.command(self._sandboxes)
        self._lead("docker.io", images.DIRECT)
        self._lead(images.KUBERNETES_PREFIX, images.DIRECT, self._sandboxes.host)
        trusted = self.root / "hosts" / PRIVATE
        trusted.mkdir()
        table = f'[host."https://{PRIVATE}"]\nca = "{self._private.ca_file}"'
        (trusted / "hosts.toml").write_text(table)
        return Program("containerd", command, restarted=True)

    def network(self) -> dict[str, object]:
        """Return the quick start's network, with this cluster's addresses."""
        text, count = re.subn(r'(?<="subnet": ")[^"]+', self.subnet, self.conflist.read_text())
        if count != 1:
            raise AssertionError(f"{self.conflist} has {count} subnets")
        found: dict[str, object] = json.loads(text)
        return found

    def _lead(self, registry: str, *hosts: str) -> None:
        """Make pulls from a registry try these hosts, one after another, until one has the image."""
        directory = self.root / "hosts" / registry
        directory.mkdir(exist_ok=True)
        tables = (f'[host."http://{host}"]\ncapabilities = ["pull", "resolve"]' for host in hosts)
        (directory / "hosts.toml").write_text("\n".join(tables))

    def end(self) -> None:
        """End the registries; the caller that runs containerd ends it."""
        self._sandboxes.stop()
        self._private.stop()
