# SPDX-License-Identifier: Apache-2.0
"""What tests of workloads share."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

from tests.cluster.case import ClusterCase, Manifest, container, pod, states, until

ROLLOUT_SECONDS = 600
PORT = 8080
# It handles SIGTERM and so ends at once, which a shell that is process 1 does not do by itself.
SERVE = (
    "mkdir -p /www && echo {page} > /www/index.html && httpd -f -p 8080 -h /www & server=$!;"
    " trap 'kill $server; exit 0' TERM; wait"
)
IDLE = "trap 'exit 0' TERM; while true; do sleep 0.5; done"


def server(page: str, **fields: Any) -> Manifest:
    """Return a container that serves `page`, with a probe that shows when it does."""
    probe = {"httpGet": {"port": PORT}, "periodSeconds": 1, "timeoutSeconds": 10}
    fields = {"ports": [{"containerPort": PORT}], "readinessProbe": probe, **fields}
    return container("main", SERVE.format(page=page), **fields)


def controlled(kind: str, name: str, *containers: Manifest, **spec: Any) -> Manifest:
    """Return a Deployment, StatefulSet or DaemonSet. `pods`: further fields of its pods' specs."""
    of_pods = {"restartPolicy": "Always", **spec.pop("pods", {})}
    labels = {"app": name}
    return {
        "apiVersion": "apps/v1",
        "kind": kind,
        "metadata": {"name": name},
        "spec": {
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod(name, *containers, **of_pods)["spec"]},
            **spec,
        },
    }


def job(name: str, *containers: Manifest, pods: Manifest | None = None, **spec: Any) -> Manifest:
    """Return a Job. `pods`: further fields of its pods' specs."""
    template = {"spec": pod(name, *containers, **(pods or {}))["spec"]}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {"template": template, **spec},
    }


def service(name: str, **spec: Any) -> Manifest:
    """Return a Service in front of the pods with the label `app: name`."""
    spec = {"selector": {"app": name}, "ports": [{"port": 80, "targetPort": PORT}], **spec}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec}


def moment(text: str) -> datetime.datetime:
    """Parse a time as Kubernetes writes it."""
    return datetime.datetime.fromisoformat(text)


def started(found: Manifest) -> datetime.datetime:
    """Return when the pod's container was started."""
    (status,) = states(found).values()
    return moment(status["state"]["running"]["startedAt"])


class WorkloadCase(ClusterCase):
    """A test with workloads of its own."""

    def rolled_out(self, what: str) -> None:
        """Wait until a workload is rolled out."""
        words = ("rollout", "status", what, f"--timeout={ROLLOUT_SECONDS}s")
        try:
            self.here(*words, timeout=ROLLOUT_SECONDS + 30)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.here('describe', 'pods')[-3000:]}") from None

    def pods(self, app: str) -> Sequence[Manifest]:
        """Return the pods of `app` that are not about to end, sorted by name."""
        found = self.get("pods", "--selector", f"app={app}")["items"]
        staying = [each for each in found if "deletionTimestamp" not in each["metadata"]]
        return sorted(staying, key=lambda each: str(each["metadata"]["name"]))

    def names(self, app: str) -> list[str]:
        """Return the names of these pods."""
        return [each["metadata"]["name"] for each in self.pods(app)]

    def run_in(self, name: str, script: str) -> str:
        """Run a script in a pod, and return its standard output. :raise AssertionError: it failed."""
        done = self.execute(name, "sh", "-c", script)
        if done.returncode:
            raise AssertionError(f"{script} in {name}: {done.returncode}: {done.stderr!r}, {done.stdout!r}")
        return done.stdout.decode()

    def until_said(self, name: str, script: str, wanted: str, seconds: float = 60) -> None:
        """Wait until a script in a pod writes `wanted`."""
        until(
            lambda: self.execute(name, "sh", "-c", script).stdout.decode().strip() == wanted,
            f"{script} in {name} says {wanted}",
            seconds,
        )

    def nodes(self) -> list[str]:
        """All nodes' names."""
        return self.kubectl("get", "nodes", "--output=jsonpath={.items[*].metadata.name}").split()
