# SPDX-License-Identifier: Apache-2.0
"""The disks of OpenStack and Azure boot in QEMU.

QEMU has no network card of Hyper-V's, so Azure's disk boots only up to where the agent would get its identity
from the network.
"""

from __future__ import annotations

from tests.e2e.cloud_disk_case import TIME_SERVER, CloudDiskCase
from tests.e2e.cloud_network import MAC
from tests.support.clouds.nova_metadata import NovaMetadata

NOVA = ("-smbios", "type=1,manufacturer=OpenStack Foundation,product=OpenStack Nova")


class MoreCloudDiskTests(CloudDiskCase):
    async def test_that_of_openstack_by_bios_from_virtio_blk(self) -> None:
        disk = self.disk("openstack", "machine")
        network = self.network(1450, time=TIME_SERVER)
        server = network.serve_time(TIME_SERVER)
        devices = ("virtio-blk-pci,drive=disk", f"virtio-net-pci,netdev=net,mac={MAC}")
        client, _ = await self.boot_pod(network, disk, devices, NovaMetadata, NOVA, timed=False)
        await self.check_machine(client, 1450)
        await self.check_nothing_waits_for_the_time(client)
        await self.until_kept(client)
        self.assertGreater(server.asked, 0)

    async def test_that_of_azure_by_secure_uefi_from_nvme_up_to_the_wait_for_its_network(self) -> None:
        disk = self.disk("azure", "docker")
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
