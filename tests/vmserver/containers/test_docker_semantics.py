# SPDX-License-Identifier: Apache-2.0
"""Containers of a real engine have what their configuration says."""

from __future__ import annotations

from twisted.trial.unittest import TestCase

from tests.contract.container_semantics import (
    ImageVolumeContract,
    MountContract,
    NamespaceContract,
    PrivilegeContract,
    ProcessContract,
    UserContract,
)
from tests.harness.needs import needs_docker
from tests.vmserver.containers.test_docker import DockerCase
from vmserver.containers.docker.cgroups import is_v2


@needs_docker
class UserTests(DockerCase, UserContract, TestCase):
    """User and groups of the first process."""


@needs_docker
class PrivilegeTests(DockerCase, PrivilegeContract, TestCase):
    """Privileges of its processes."""


@needs_docker
class NamespaceTests(DockerCase, NamespaceContract, TestCase):
    """Which namespaces it shares."""


@needs_docker
class ProcessTests(DockerCase, ProcessContract, TestCase):
    """Its command, environment, devices and limits."""

    frees_memory = is_v2()


@needs_docker
class ImageVolumeTests(DockerCase, ImageVolumeContract, TestCase):
    """Images mounted as volumes."""

    volumes = "docker/images"


@needs_docker
class MountTests(DockerCase, MountContract, TestCase):
    """Mount propagation between the containers of a pod, and what mounts do not allow."""

    modes = (False,)  # Docker's API lacks the others, and crun drops them when it makes a mount read-only
