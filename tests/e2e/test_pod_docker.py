# SPDX-License-Identifier: Apache-2.0
"""What pods on real VMs do, in a guest image of Docker alone."""

from __future__ import annotations

from tests.e2e import test_pod
from tests.e2e.pod_case import DOCKER_ALONE


class DockerPodTests(test_pod.PodTests):
    """The same tests, of what Docker has a part in."""

    images = DOCKER_ALONE
    contprovider = "docker"

    test_a_pod_fills_its_own_disk_alone = None  # type: ignore[assignment]
    test_on_a_full_node_writes_fail_in_the_pod_and_it_is_stopped_at_once = None  # type: ignore[assignment]
