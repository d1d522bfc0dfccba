# SPDX-License-Identifier: Apache-2.0
"""VMs are as large as their pods request, though kubelet does not tell requests to a runtime."""

from __future__ import annotations

from tests.cluster.case import ClusterCase, Manifest, container, pod, states

MEMORY = "grep MemTotal /proc/meminfo"


def requesting(memory: str) -> Manifest:
    """Return the resources of a container that requests memory and has no limit."""
    return {"requests": {"cpu": "50m", "memory": memory}}


class RequestTests(ClusterCase):
    def test_a_vm_has_the_memory_that_its_containers_request_together(self) -> None:
        main = container("main", MEMORY, resources=requesting("1Gi"))
        sidecar = container("sidecar", "sleep 3600", resources=requesting("512Mi"), restartPolicy="Always")
        self.apply(pod("web", main, initContainers=[sidecar]))
        self.apply(pod("small", container("main", MEMORY, resources={"requests": {"cpu": "50m"}})))
        self.assertEqual(set(states(self.wait_for_phase("web", "Succeeded"))), {"main"})
        self.wait_for_phase("small", "Succeeded")
        web, small = (
            int(self.logs(name, "--container", "main").split()[1]) >> 10 for name in ("web", "small")
        )
        self.assertGreater(web, 1536)
        self.assertLess(small, 1100)
