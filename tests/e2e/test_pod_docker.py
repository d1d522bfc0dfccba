# SPDX-License-Identifier: Apache-2.0
"""Pods on real VMs, in a guest image that has only Docker."""

from __future__ import annotations

from tests.e2e import test_pod
from tests.e2e.pod_case import DOCKER_ALONE


class DockerPodTests(test_pod.PodTests):
    """The same tests, with Docker."""

    images = DOCKER_ALONE
    contprovider = "docker"
