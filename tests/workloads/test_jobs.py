# SPDX-License-Identifier: Apache-2.0
"""Jobs do their work, and only once."""

from __future__ import annotations

from collections import Counter

from tests.cluster.case import container, host_path, states, until
from tests.workloads.case import WorkloadCase, job

COMPLETIONS = 50
# Each run leaves a file of its own, independently of what the cluster reports.
RECORD = 'echo > "/runs/$INDEX.$POD.$(cat /proc/sys/kernel/random/uuid)"'


def field(name: str, path: str) -> dict[str, object]:
    """Return an environment variable with a field of the pod."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


class JobTests(WorkloadCase):
    def test_each_of_fifty_quick_completions_runs_once(self) -> None:
        runs = self.directory()
        index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
        task = container(
            "task", RECORD,
            env=[field("INDEX", index), field("POD", "metadata.name")],
            volumeMounts=[{"name": "runs", "mountPath": "/runs"}],
        )  # fmt: skip
        fifty = job(
            "fifty", task,
            completions=COMPLETIONS,
            parallelism=5,
            completionMode="Indexed",
            backoffLimit=0,
            pods={"volumes": [host_path("runs", runs)]},
        )  # fmt: skip
        self.apply(fifty)
        self.wait("job/fifty", "condition=Complete", 1500)
        status = self.get("job", "fifty")["status"]
        self.assertEqual((status["succeeded"], status.get("failed", 0)), (COMPLETIONS, 0))
        found = self.get("pods", "--selector=job-name=fifty")["items"]
        self.assertEqual({states(each)["task"]["restartCount"] for each in found}, {0})
        self.assertEqual(len(found), COMPLETIONS)
        # A pod's files are on the node once it has ended.
        ran = Counter(int(path.name.partition(".")[0]) for path in runs.iterdir())
        self.assertEqual(ran, Counter(range(COMPLETIONS)))


class CronJobTests(WorkloadCase):
    def test_a_cron_job_runs_by_its_schedule_and_by_hand(self) -> None:
        task = container("task", "echo done")
        template = job("tick", task, backoffLimit=0)["spec"]
        spec = {"schedule": "* * * * *", "concurrencyPolicy": "Forbid", "jobTemplate": {"spec": template}}
        self.apply({"apiVersion": "batch/v1", "kind": "CronJob", "metadata": {"name": "tick"}, "spec": spec})
        until(lambda: self.get("jobs")["items"], "the minute has come", 100)
        self.here("patch", "cronjob", "tick", "--patch", '{"spec": {"suspend": true}}')
        for each in self.get("jobs")["items"]:
            self.wait(f"job/{each['metadata']['name']}", "condition=Complete")
        self.here("create", "job", "by-hand", "--from=cronjob/tick")
        self.wait("job/by-hand", "condition=Complete")
        self.assertEqual(self.here("logs", "job/by-hand"), "done\n")
        for each in self.get("jobs")["items"]:
            self.assertEqual((each["status"]["succeeded"], each["status"].get("failed", 0)), (1, 0))
