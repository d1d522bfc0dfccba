# SPDX-License-Identifier: Apache-2.0
"""When a pod counts as ready."""

from __future__ import annotations

from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from bench.kubelet_pods import is_ready, manifest


def pod(**conditions: str) -> dict[str, Any]:  # Any: JSON
    return {"status": {"conditions": [{"type": each, "status": was} for each, was in conditions.items()]}}


class ReadyTests(SynchronousTestCase):
    def test_a_pod_is_ready_when_that_condition_is_true(self) -> None:
        self.assertTrue(is_ready(pod(Initialized="True", Ready="True")))
        self.assertFalse(is_ready(pod(Initialized="True", Ready="False")))
        self.assertFalse(is_ready(pod(Initialized="True")))

    def test_a_pod_that_kubelet_has_not_seen_is_not(self) -> None:
        self.assertFalse(is_ready({"status": {"phase": "Pending"}}))

    def test_it_has_the_image_that_is_measured(self) -> None:
        spec: Any = manifest("one", "registry/debian:12", vm=True)["spec"]  # Any: JSON
        self.assertEqual([each["image"] for each in spec["containers"]], ["registry/debian:12"])

    def test_the_label_that_keeps_it_from_being_a_vm_is_on_the_others_alone(self) -> None:
        for vm, labels in ((True, {}), (False, {"infranetes.io/runtime": "node"})):
            metadata: Any = manifest("one", "busybox", vm)["metadata"]  # Any: JSON
            self.assertEqual(metadata["labels"], labels)
