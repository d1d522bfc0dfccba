# SPDX-License-Identifier: Apache-2.0
"""emptyDirs as kubelet makes and watches them: one directory for all mounts, evicted at their limit."""

from __future__ import annotations

from tests.cluster.case import container, pod
from tests.workloads.case import WorkloadCase

LIMIT = "16Mi"
EVICTED = f'Usage of EmptyDir volume "cache" exceeds the limit "{LIMIT}"'
EVICTED_SECONDS = 400  # kubelet adds up each minute or two what volumes take


def mount(path: str, **fields: object) -> dict[str, object]:
    """A mount of the emptyDir."""
    return {"name": "cache", "mountPath": path, **fields}


class EmptyDirTests(WorkloadCase):
    def test_one_that_exceeds_its_limit_has_its_pod_evicted(self) -> None:
        made = container("made", "echo told > /cache/config", volumeMounts=[mount("/cache")])
        writes = container(
            "writes", "cat /config; until cat /cache/a/asked; do sleep 0.2; done; "
            "dd if=/dev/zero of=/cache/large bs=1M count=48; sleep 1000",
            volumeMounts=[mount("/cache"), mount("/config", subPath="config")],
        )  # fmt: skip
        asks = container(
            "asks", "echo go > /part/asked; sleep 1000", volumeMounts=[mount("/part", subPath="a")]
        )
        volume = {"name": "cache", "emptyDir": {"sizeLimit": LIMIT}}
        self.apply(pod("greedy", writes, asks, initContainers=[made], volumes=[volume]))
        self.wait("pod/greedy", "jsonpath={.status.reason}=Evicted", EVICTED_SECONDS)
        self.assertIn(EVICTED, self.get("pod", "greedy")["status"]["message"])
        events = self.get("events")["items"]
        self.assertEqual([each["message"] for each in events if each["reason"] == "Failed"], [])
