# SPDX-License-Identifier: Apache-2.0
"""A Deployment is rolled over under its clients' feet."""

from __future__ import annotations

from collections import Counter

from tests.cluster.case import Manifest, container, pod, until
from tests.workloads.case import WorkloadCase, controlled, server, service

# Sends one request after another, each on a connection of its own. (With -T, busybox' wget crashes.)
ASKING = (
    "while true; do at=$(date +%T); if page=$(timeout 30 wget -q -O - http://web/ 2>/tmp/error); then"
    ' echo "$page"; else echo "failed: $at to $(date +%T) $(cat /tmp/error)"; fi >> /tmp/answers;'
    " sleep 0.1; done"
)
MORE = 20  # requests


class RollingUpdateTests(WorkloadCase):
    def deployment(self, page: str) -> Manifest:
        """Return a typical Deployment, whose pods serve on for some seconds once removed from the Service."""
        before_end = {"preStop": {"sleep": {"seconds": 10}}}
        return controlled(
            "Deployment", "web", server(page, lifecycle=before_end),
            replicas=2,
            strategy={"rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            pods={"terminationGracePeriodSeconds": 60},
        )  # fmt: skip

    def answers(self) -> Counter[str]:
        """Return how often the client got each answer."""
        return Counter(self.run_in("client", "cat /tmp/answers").splitlines())

    def left(self) -> set[str]:
        """Return the names of the server's pods, including those that are about to end."""
        return set(self.here("get", "pods", "--selector", "app=web", "--output", "name").split())

    def test_no_request_fails_under_a_rolling_update(self) -> None:
        self.apply(self.deployment("first"), service("web"))
        self.rolled_out("deployment/web")
        self.apply(pod("client", container("client", ASKING)))
        self.wait_until_ready("client")
        until(lambda: self.answers()["first"] > MORE, "the first version answers", 60)
        # The client may have begun before its VM knew the Service's endpoints.
        self.run_in("client", ": > /tmp/answers")
        old = self.left()
        for page in ("second", "third"):
            self.apply(self.deployment(page))
            self.rolled_out("deployment/web")
            until(lambda: not old & self.left(), "the old pods are gone", 120)  # noqa: B023
            old = self.left()
            before = self.answers()[page]
            until(lambda: self.answers()[page] > before + MORE, f"the {page} version answers", 60)  # noqa: B023
        counted = self.answers()
        print(f"[{counted.total()} requests]", end=" ")
        self.assertEqual({each for each in counted if each not in ("first", "second", "third")}, set())
