# SPDX-License-Identifier: Apache-2.0
"""What tests of nodes with both kinds of pods share."""

from __future__ import annotations

import atexit
import json
from typing import Any

from tests.cluster.case import RUNTIME, Cluster, Manifest, pod, shared
from tests.cluster.components import MIXED
from tests.workloads.case import WorkloadCase

_own: list[Cluster] = []


def on_the_node(name: str, *containers: Manifest, **spec: Any) -> Manifest:
    """Return a pod of containerd's, where pods are VMs by default."""
    made = pod(name, *containers, **spec)
    made["metadata"]["labels"]["infranetes.io/runtime"] = "node"
    return made


def in_a_vm(name: str, *containers: Manifest, **spec: Any) -> Manifest:
    """Return a pod that is a VM."""
    return pod(name, *containers, runtimeClassName="infranetes", **spec)


class MixedCase(WorkloadCase):
    """A test case with a cluster of mixed nodes: the shared one if it is so, or one for all these tests."""

    def running(self) -> Cluster:
        if RUNTIME == MIXED:
            return shared()
        if not _own:
            cluster = Cluster("mixed", "--runtime", MIXED)
            atexit.register(cluster.stop)
            _own.append(cluster.start())
        return _own[0].wait_until_ready()

    def of_containerd(self, *words: str) -> Any:
        """Return the JSON that crictl prints when it asks containerd directly, not the daemon."""
        socket = self.cluster.paths.place / "containerd" / "cri.sock"
        asked = ("crictl", "--runtime-endpoint", f"unix://{socket}", *words, "--output", "json")
        return json.loads(self.cluster.inside(*asked))

    def sandboxes_of_containerd(self) -> list[Manifest]:
        """Return containerd's sandboxes of this test's pods, with the shadows that hold VMs' networks."""
        listed = self.of_containerd("pods")["items"]
        return [each for each in listed if each["metadata"]["namespace"] == self.namespace]

    def pods_of_the_daemon(self) -> list[Manifest]:
        """Return the daemon's sandboxes of this test's pods."""
        listed = json.loads(self.cluster.inside("infranetes-ctl", "pods", "--json"))["pods"]
        return [each for each in listed if each["namespace"] == self.namespace]
