# SPDX-License-Identifier: Apache-2.0
"""Containers of conmon and crun have what their configuration says."""

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
from tests.vmserver.containers.oci.provider_case import OciCase
from vmserver.containers.oci.cgroup import is_v2


class UserTests(OciCase, UserContract, TestCase):
    """User and groups of the first process."""


class PrivilegeTests(OciCase, PrivilegeContract, TestCase):
    """Privileges of its processes."""


class NamespaceTests(OciCase, NamespaceContract, TestCase):
    """Which namespaces it shares."""


class ProcessTests(OciCase, ProcessContract, TestCase):
    """Its command, environment, devices and limits."""

    frees_processor = is_v2()


class ImageVolumeTests(OciCase, ImageVolumeContract, TestCase):
    """Images mounted as volumes."""

    volumes = "oci/volumes"


class MountTests(OciCase, MountContract, TestCase):
    """Mount propagation between the containers of a pod."""
