# SPDX-License-Identifier: Apache-2.0
"""Containers that are to run once run once."""

from __future__ import annotations

import re
from collections import Counter

from tests.cluster.case import ClusterCase, container, host_path, pod, states

# Each run leaves a file of its own, independently of what the cluster reports.
RECORD = 'mkdir -p /runs && echo > "/runs/$(hostname).$(cat /proc/sys/kernel/random/uuid)"'


class OnceTests(ClusterCase):
    def starts(self) -> int:
        """Return how often a container was started since the test began; no other test runs meanwhile."""
        return len(re.findall(r"\bStartContainer took\b", self.daemon_log()))

    def test_init_containers_that_end_at_once_run_once_each(self) -> None:
        names = [f"init-{number}" for number in range(4)]
        mounts = [{"name": "runs", "mountPath": "/runs"}]
        quick = [container(name, f"echo {name} >> /runs/all", volumeMounts=mounts) for name in names]
        main = container("main", "cat /runs/all", volumeMounts=mounts)
        for number in range(3):
            name = f"quick-{number}"
            self.apply(pod(name, main, initContainers=quick, volumes=[{"name": "runs", "emptyDir": {}}]))
        for number in range(3):
            name = f"quick-{number}"
            done = self.wait_for_phase(name, "Succeeded")
            self.assertEqual(self.logs(name).split(), names)
            restarts = {each["restartCount"] for each in states(done, "initContainerStatuses").values()}
            self.assertEqual(restarts, {0})
        self.assertEqual(self.starts(), 3 * 5)

    def test_the_containers_of_a_pod_that_end_at_once_run_once_each(self) -> None:
        runs = self.directory()
        mounts = [{"name": "runs", "mountPath": "/runs"}]
        quick = [container(name, f"{RECORD}.{name}", volumeMounts=mounts) for name in ("a", "b", "c")]
        self.apply(pod("several", *quick, volumes=[host_path("runs", runs)]))
        done = self.wait_for_phase("several", "Succeeded")
        self.assertEqual({each["restartCount"] for each in states(done).values()}, {0})
        self.assertEqual(sorted(path.suffix for path in runs.iterdir()), [".a", ".b", ".c"])
        self.assertEqual(self.starts(), 3)

    def test_a_job_of_twenty_completions_runs_twenty_containers(self) -> None:
        runs = self.directory()
        mounts = [{"name": "runs", "mountPath": "/runs", "subPathExpr": "$(POD)"}]
        name = {"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
        task = container("task", RECORD, volumeMounts=mounts, env=[name])
        template = pod("task", task, volumes=[host_path("runs", runs)])
        self.apply(
            {
                "apiVersion": "batch/v1",
                "kind": "Job",
                "metadata": {"name": "twenty"},
                "spec": {
                    "completions": 20,
                    "parallelism": 4,
                    "backoffLimit": 20,
                    "template": {"spec": template["spec"]},
                },
            }
        )
        self.wait("job/twenty", "condition=Complete", 900)
        status = self.get("job", "twenty")["status"]
        self.assertEqual((status["succeeded"], status.get("failed", 0)), (20, 0))
        ran = Counter(path.parent.name for path in runs.glob("*/*"))
        self.assertEqual(sorted(ran.values()), [1] * 20)
        self.assertEqual(self.starts(), 20)
