# SPDX-License-Identifier: Apache-2.0
"""A pod that kubectl resizes while it runs: its VM grows and shrinks, and its container runs on."""

from __future__ import annotations

import json
from collections.abc import Mapping

from tests.cluster.case import WAIT_SECONDS, ClusterCase, Manifest, container, pod, states, until


class ResizeTests(ClusterCase):
    def resize(self, name: str, **limits: str) -> None:
        """Set these limits of the pod's container, and leave its others."""
        change = {"spec": {"containers": [{"name": "main", "resources": {"limits": limits}}]}}
        self.here("patch", "pod", name, "--subresource", "resize", "--patch", json.dumps(change))

    def limits(self, name: str) -> Mapping[str, str]:
        """Return the limits that kubelet reports as in force."""
        found: Mapping[str, str] = states(self.get("pod", name))["main"]["resources"]["limits"]
        return found

    def guest(self, name: str) -> tuple[int, int]:
        """Return the number of the VM's processors, and its memory in MiB."""
        script = "grep -c ^processor /proc/cpuinfo; grep MemTotal /proc/meminfo"
        cpus, memory = self.execute(name, "sh", "-c", script).stdout.decode().splitlines()
        return int(cpus), int(memory.split()[1]) >> 10

    def test_a_vm_grows_and_gives_memory_back(self) -> None:
        resources = {
            "requests": {"cpu": "100m", "memory": "64Mi"},
            "limits": {"cpu": "500m", "memory": "256Mi"},
        }
        main: Manifest = container("main", "sleep 3600", resources=resources)
        self.apply(pod("web", main))
        self.wait_until_ready("web")
        cpus, memory = self.guest("web")
        self.assertEqual(cpus, 1)
        self.assertLess(memory, 1100)

        self.resize("web", cpu="1500m")
        until(lambda: self.limits("web").get("cpu") == "1500m", "two processors", WAIT_SECONDS)
        self.assertEqual(self.guest("web")[0], 2)

        self.resize("web", memory="1536Mi")
        until(lambda: self.limits("web").get("memory") == "1536Mi", "1536 MiB", WAIT_SECONDS)
        self.assertGreater(self.guest("web")[1], 1536)

        self.resize("web", memory="512Mi")
        until(lambda: self.limits("web").get("memory") == "512Mi", "512 MiB", WAIT_SECONDS)
        self.assertLess(self.guest("web")[1], 1100, "the guest has it no more")
        self.resize("web", memory="1Gi")
        until(lambda: self.limits("web").get("memory") == "1Gi", "1 GiB", WAIT_SECONDS)
        self.assertGreater(self.guest("web")[1], 1100)
        found = self.get("pod", "web")
        self.assertEqual(found["status"]["resources"]["limits"]["memory"], "1Gi", "the pod is as large")
        self.assertEqual(states(found)["main"]["restartCount"], 0)
