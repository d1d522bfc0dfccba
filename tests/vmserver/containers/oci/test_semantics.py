# SPDX-License-Identifier: Apache-2.0
"""Containers run by conmon and crun have what their configuration says."""

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
from tests.harness.needs import needs_crun
from tests.vmserver.containers.oci.provider_case import OciCase
from vmserver.containers.oci import addresses
from vmserver.containers.oci.cgroup import is_v2


@needs_crun
class UserTests(OciCase, UserContract, TestCase):
    """User and groups of the first process."""


@needs_crun
class PrivilegeTests(OciCase, PrivilegeContract, TestCase):
    """Privileges of its processes."""


@needs_crun
class NamespaceTests(OciCase, NamespaceContract, TestCase):
    """Which namespaces it shares."""


@needs_crun
class ProcessTests(OciCase, ProcessContract, TestCase):
    """Its command, environment, devices and limits."""

    frees_processor = is_v2()

    async def test_its_addresses_are_random_where_those_of_crun_are_not(self) -> None:
        self.patch(addresses, "emulated", lambda: True)
        id = await self.run_container("sh", "-c", "cat /proc/self/personality; sleep 1000")
        command = ["cat", "/proc/self/personality"]
        executed = await self.provider.exec_sync(id, command, 30.0, 1000)
        self.assertEqual(executed.stdout, b"00000000\n")
        await self.until(lambda: self.log_of(id).endswith("00000000\n"), "its first process says so too")

    def log_of(self, id: str) -> str:
        return (self.config.directory / "containers" / id / "log").read_text()


@needs_crun
class ImageVolumeTests(OciCase, ImageVolumeContract, TestCase):
    """Images mounted as volumes."""

    volumes = "oci/volumes"


@needs_crun
class MountTests(OciCase, MountContract, TestCase):
    """Mount propagation between the containers of a pod, and what mounts do not allow."""
