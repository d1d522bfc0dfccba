# SPDX-License-Identifier: Apache-2.0
"""What pods on real VMs do, in a guest image of Docker alone."""

from __future__ import annotations

from tests.e2e import test_pod
from tests.e2e.pod_case import DOCKER_ALONE


class DockerPodTests(test_pod.PodTests):
    """The same tests, on Docker."""

    images = DOCKER_ALONE
    contprovider = "docker"
