# SPDX-License-Identifier: Apache-2.0
"""A claim is given a volume, which grows under its pod and goes with the claim, by Kubernetes' sidecars."""

from __future__ import annotations

import json

from tests.cluster.case import Cluster, container, pod, until
from tests.cluster.paths import PROGRAMS
from tests.workloads.case import IDLE, WorkloadCase

PROVISIONER = PROGRAMS / "csi-provisioner"
VOLUMES = "/var/lib/infranetes/qemu/volumes"


class ClaimTests(WorkloadCase):
    if not PROVISIONER.exists():
        skip = "the external-provisioner is made by `make workloads`"

    def running(self) -> Cluster:
        cluster = Cluster("claims", "--storage")
        self.addCleanup(cluster.stop)
        return cluster.start().wait_until_ready()

    def nodes_with_room(self) -> list[str]:
        """Return the nodes of which the scheduler is told that they have room."""
        said = self.kubectl("get", "csistoragecapacities", "--namespace=kube-system", "--output=json")
        return [
            each["nodeTopology"]["matchLabels"]["infranetes.io/node"] for each in json.loads(said)["items"]
        ]

    def size(self) -> int:
        """Return the size of the file system in the pod, in MiB."""
        return int(self.run_in("first", "df -m /data | tail -1").split()[1])

    def test_its_volume_is_made_grows_under_a_pod_and_goes_with_it(self) -> None:
        claim = {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "data"},
            "spec": {
                "accessModes": ["ReadWriteOncePod"],
                "storageClassName": "infranetes",
                "resources": {"requests": {"storage": "64Mi"}},
            },
        }
        mounts = [{"name": "data", "mountPath": "/data"}]
        volumes = [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]
        self.apply(claim, pod("first", container("main", IDLE, volumeMounts=mounts), volumes=volumes))
        self.wait_until_ready("first")
        self.run_in("first", "echo kept > /data/file")
        self.assertTrue(32 <= self.size() <= 64, self.size())
        self.assertEqual(self.nodes_with_room(), ["node"])

        wanted = '{"spec": {"resources": {"requests": {"storage": "256Mi"}}}}'
        self.here("patch", "persistentvolumeclaim", "data", "--patch", wanted)
        self.wait("persistentvolumeclaim/data", "jsonpath={.status.capacity.storage}=256Mi")
        self.assertTrue(128 <= self.size() <= 256, self.size())
        self.assertEqual(self.run_in("first", "cat /data/file"), "kept\n")

        volume = self.get("persistentvolumeclaim", "data")["spec"]["volumeName"]
        (file,) = self.cluster.inside("ls", VOLUMES).split()
        self.here("delete", "pod/first", "persistentvolumeclaim/data", "--timeout=120s", timeout=150)
        until(lambda: not self.cluster.inside("ls", VOLUMES), f"{file} of {volume} is gone", 60)
