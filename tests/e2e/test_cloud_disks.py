# SPDX-License-Identifier: Apache-2.0
"""The disks of clouds boot in QEMU, until the agent has its identity from the cloud.

QEMU has no guestinfo, and no network card of Hyper-V's, so the disks of vSphere and Azure boot only up to
where the agent would get its identity by these.
"""

from __future__ import annotations

from infranetes.guest import cloud_time
from tests.e2e.cloud_disk_case import BEHIND_SECONDS, TIME_SERVER, CloudDiskCase
from tests.e2e.cloud_network import MAC
from tests.support.clouds.gce_metadata import GceMetadata
from tests.support.clouds.imds import Imds
from tests.support.clouds.nova_metadata import NovaMetadata


class CloudDiskTests(CloudDiskCase):
    async def test_that_of_aws_by_bios_from_nvme(self) -> None:
        disk = self.disk("aws")
        network = self.network(9001)
        server = network.serve_time(cloud_time.LINK_LOCAL_AWS)
        devices = ("nvme,drive=disk,serial=vol0123456789abcdef0", f"virtio-net-pci,netdev=net,mac={MAC}")
        client, _ = await self.boot_pod(
            network, disk, devices, lambda document: Imds({network.address: document}), timed=False
        )
        await self.check_machine(client, 9001)
        self.assertEqual(await self.ran(client, "systemctl", "is-active", "own"), "active")
        await self.until_kept(client)
        self.assertGreater(server.asked, 0)
        await self.check_its_end_is_made_good(client)
        await self.until_kept(client)
        [set_by] = (await self.ran(client, "cat", "/run/clock-settings")).split()
        self.assertApproximates(float(set_by), BEHIND_SECONDS, 60, "the one time that the clock was set")
        self.assertNotIn(":123 ", await self.ran(client, "ss", "-lnu"), "the port is the pod's")

    async def test_that_of_gcp_by_secure_uefi_from_virtio_scsi(self) -> None:
        disk = self.disk("gcp")
        network = self.network(1460, lone=True)
        devices = ("virtio-scsi-pci", "scsi-hd,drive=disk", f"virtio-net-pci,netdev=net,mac={MAC}")
        firmware = self.secure_firmware()
        client, identity = await self.boot_pod(network, disk, devices, GceMetadata, firmware)
        await self.check_clock(client, identity)
        await self.check_machine(client, 1460)
        self.assertTrue(self.seen("Secure boot enabled"))
        await self.check_nothing_waits_for_the_time(client)
        network.serve_time(cloud_time.LINK_LOCAL_GCP)
        await self.until_kept(client)

    async def test_that_of_vsphere_by_bios_from_pvscsi_up_to_the_wait_for_guestinfo(self) -> None:
        disk = self.disk("vsphere")
        network = self.network(1500, time=TIME_SERVER)
        network.serve_time(TIME_SERVER)
        self.boot(network, disk, "pvscsi", "scsi-hd,drive=disk", f"vmxnet3,netdev=net,mac={MAC}")
        await self.until(network.leased, "an address")
        await self.until(
            lambda: self.seen("no identity from the cloud yet: `vmtoolsd"), "a wait for guestinfo"
        )
        await self.until(lambda: self.seen("Started docker.service"), "Docker")
        self.assertTrue(self.seen("resizing filesystem"))
        await self.until(lambda: self.seen("System clock was stepped by 3"), "the time of DHCP's server")


NOVA = ("-smbios", "type=1,manufacturer=OpenStack Foundation,product=OpenStack Nova")


class MoreCloudDiskTests(CloudDiskCase):
    async def test_that_of_openstack_by_bios_from_virtio_blk(self) -> None:
        disk = self.disk("openstack")
        network = self.network(1450, time=TIME_SERVER)
        server = network.serve_time(TIME_SERVER)
        devices = ("virtio-blk-pci,drive=disk", f"virtio-net-pci,netdev=net,mac={MAC}")
        client, _ = await self.boot_pod(network, disk, devices, NovaMetadata, NOVA, timed=False)
        await self.check_machine(client, 1450)
        await self.check_nothing_waits_for_the_time(client)
        await self.until_kept(client)
        self.assertGreater(server.asked, 0)

    async def test_that_of_azure_by_secure_uefi_from_nvme_up_to_the_wait_for_its_network(self) -> None:
        disk = self.disk("azure")
        network = self.network(1500)
        devices = ("nvme,drive=disk,serial=azure", f"virtio-net-pci,netdev=net,mac={MAC}")
        self.boot(network, disk, *devices, firmware=self.secure_firmware())
        await self.until(
            lambda: self.seen("no identity from the cloud yet: the metadata service does not answer"),
            "a wait for the metadata service",
        )
        await self.until(lambda: self.seen("Started docker.service"), "Docker")
        self.assertTrue(self.seen("Secure boot enabled"))
        self.assertTrue(self.seen("resizing filesystem"))
        # Accelerated networking adds such a card, which has the address of Hyper-V's.
        self.assertFalse(network.leased(), "a card that is not Hyper-V's has asked for an address")
