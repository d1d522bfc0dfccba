# SPDX-License-Identifier: Apache-2.0
"""A volume is had as what it is: a file system as a mount, a raw one as a device."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from infranetes.volumes.checks import check_device, check_mount
from infranetes.volumes.published import PublishedVolume
from infranetes_common.errors import FailedPrecondition
from infranetes_common.wire import cri
from tests.support.user_namespaces import ids, namespaces, of_container

RAW, MOUNTED = PublishedVolume("v", ""), PublishedVolume("v", "ext4")


class CheckTests(SynchronousTestCase):
    def test_a_mount_is_of_a_file_system_with_the_ids_that_are_in_it(self) -> None:
        check_mount(cri.Mount(), MOUNTED)
        self.assertRaisesRegex(FailedPrecondition, "volumeDevices", check_mount, cri.Mount(), RAW)
        for mount in (cri.Mount(uidMappings=ids()), cri.Mount(gidMappings=ids())):
            self.assertRaisesRegex(FailedPrecondition, "mapped ids", check_mount, mount, MOUNTED)

    def test_a_device_is_a_raw_volume_of_a_pod_without_a_user_namespace(self) -> None:
        plain = cri.ContainerConfig()
        check_device(plain, RAW)
        self.assertRaisesRegex(FailedPrecondition, "volumeMounts", check_device, plain, MOUNTED)
        users = cri.ContainerConfig(linux=of_container(namespaces()))
        self.assertRaisesRegex(FailedPrecondition, "hostUsers", check_device, users, RAW)
        of_node = cri.NamespaceOption(userns_options=cri.UserNamespace(mode=cri.NODE))
        check_device(cri.ContainerConfig(linux=of_container(of_node)), RAW)
