# SPDX-License-Identifier: Apache-2.0
"""Pods of a kubelet whose static CPU and memory managers give containers processors and memory nodes."""

from __future__ import annotations

import json

from tests.cluster.case import WAIT_SECONDS, Cluster, ClusterCase, Manifest, container, pod, states, until

# Of a node of two processors one is reserved, and so is left for the pods that request none.
OWN = {"cpu": "1", "memory": "256Mi"}
GUEST = "grep -c ^processor /proc/cpuinfo; grep Cpus_allowed_list /proc/self/status"


class PinningTests(ClusterCase):
    def running(self) -> Cluster:
        cluster = Cluster("pinning", "--pinning")
        self.addCleanup(cluster.stop)
        return cluster.start().wait_until_ready()

    def allowed(self, name: str) -> set[tuple[str, str]]:
        """Return the processors and the memory nodes on which the node lets the threads of a pod's VM run."""
        (token,) = [
            each["vm"]["id"].removeprefix("qemu-")
            for each in json.loads(self.cluster.inside("infranetes-ctl", "pods", "--json"))["pods"]
            if (each["namespace"], each["name"]) == (self.namespace, name)
        ]
        script = "grep -h _allowed_list /proc/$(pgrep -f guest=infranetes-$0)/task/*/status"
        lists = [line.split()[1] for line in self.cluster.inside("sh", "-c", script, token).splitlines()]
        return set(zip(lists[::2], lists[1::2], strict=True))

    def in_use(self, name: str) -> tuple[str, str]:
        """Return the processors and the memory nodes of a pod's container, as kubelet reads them back."""
        id = states(self.get("pod", name))["main"]["containerID"].rpartition("/")[2]
        resources = json.loads(self.cluster.inside("crictl", "inspect", id))["status"]["resources"]["linux"]
        return resources["cpusetCpus"], resources["cpusetMems"]

    def test_the_vm_has_what_kubelet_gave_and_the_guest_none_of_these_numbers(self) -> None:
        main: Manifest = container("main", f"{GUEST}; sleep 3600", resources={"requests": OWN, "limits": OWN})
        self.apply(pod("own", main))
        self.wait_until_ready("own")
        cpus, mems = self.in_use("own")
        self.assertEqual(mems, "0")
        self.assertNotIn(cpus, ("", "0"))
        self.assertEqual(self.allowed("own"), {(cpus, mems)})
        self.assertEqual(self.logs("own").split()[::2], ["1", "0"])  # its only one, whatever the node's is

        self.apply(pod("other", container("main", "sleep 3600")))
        self.wait_until_ready("other")
        until(lambda: self.in_use("other")[0] not in ("", cpus), "it has what is left", WAIT_SECONDS)
        ((left, _),) = self.allowed("other")
        self.assertFalse(set(left.split(",")) & set(cpus.split(",")))
        self.here("delete", "pod", "own")
        until(lambda: self.allowed("other") != {(left, mems)}, "it has all again", WAIT_SECONDS)
        self.assertEqual(states(self.get("pod", "other"))["main"]["restartCount"], 0)
