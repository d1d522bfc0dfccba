# SPDX-License-Identifier: Apache-2.0
"""Launches of VMs whose root is a volume: real QEMUs, whose guests are a sector long."""

from __future__ import annotations

from pathlib import Path

from twisted.trial.unittest import TestCase

from infranetes.providers.interface import Instance
from infranetes.providers.machine_images import BootDisk
from infranetes.providers.qemu.provider import QemuProvider
from infranetes.providers.volumes import ROOT_SERIAL
from infranetes_common.errors import FailedPrecondition, Unavailable
from tests.harness.durations import slow
from tests.harness.needs import needs_netns, needs_programs, needs_qemu
from tests.infranetes.providers.qemu.launch.test_images import LaunchCase

MIB = 1 << 20


@needs_netns
@needs_qemu
@needs_programs("qemu-img")
class RootVolumeTests(LaunchCase, TestCase):
    """VMs with a root that stays."""

    async def with_root(self, provider: QemuProvider) -> BootDisk:
        """Return a volume that is a root."""
        await self.within(provider.volumes.create("root-0", MIB))
        self.disk.chmod(0o444)
        return await self.within(provider.volumes.root("root-0", self.base, False))

    async def has_it_alone(self, provider: QemuProvider, instance: Instance) -> None:
        """Assert that the VM has the volume, and that nobody else gets it."""
        volumes = provider.volumes
        self.assertEqual(await self.within(volumes.attach(instance.id, "root-0", False)), ROOT_SERIAL)
        await self.refused(Unavailable, volumes.detach(instance.id, "root-0"))
        await self.refused(FailedPrecondition, volumes.delete("root-0"))
        await self.refused(FailedPrecondition, volumes.root("root-0", self.base, True))
        other = await self.prepared_vm(provider)
        await self.refused(FailedPrecondition, volumes.attach(other.id, "root-0", False))
        await self.within(volumes.detach(other.id, "root-0"))
        await self.within(provider.destroy(other.id))

    @slow(9, "it boots VMs one after the other, and restarts the daemon")
    async def test_it_boots_from_the_volume_which_is_its_own_until_it_is_destroyed(self) -> None:
        provider = await self.image_provider()
        root = await self.with_root(provider)
        for _ in range(2):
            instance = await self.boots(provider, root=root)
            await self.has_it_alone(provider, instance)
            await self.refused(FailedPrecondition, provider.launch(self.image_spec(root=root)))
            self.assertFalse((Path(self.state_dir) / "qemu" / "vms" / instance.token / "disk.qcow2").exists())
            next_provider = await self.restarted(provider)
            assert isinstance(next_provider, QemuProvider)
            provider = next_provider
            await self.has_it_alone(provider, instance)
            await self.within(provider.volumes.expand("root-0", 2 * MIB))
            await self.within(provider.destroy(instance.id))
            root = await self.within(provider.volumes.root("root-0", self.base, False))
        await self.within(provider.volumes.delete("root-0"))

    @slow(4, "it boots a VM")
    async def test_a_snapshot_of_it_is_taken_while_its_guest_runs(self) -> None:
        provider = await self.image_provider()
        await self.boots(provider, root=await self.with_root(provider))
        snapshot = await self.within(provider.volumes.snapshots.create("then", "root-0"))
        self.assertEqual(snapshot.size, MIB)

    @slow(5, "it boots a VM and ends it")
    async def test_a_guest_that_has_ended_keeps_it_until_its_vm_is_destroyed(self) -> None:
        provider = await self.image_provider()
        instance = await self.boots(provider, root=await self.with_root(provider))
        hypervisor = provider.hypervisor(instance.id)
        await hypervisor.console.write(b"O")
        await self.until(lambda: hypervisor.console.ended, "the guest has ended")
        await self.refused(Unavailable, provider.volumes.detach(instance.id, "root-0"))
        await self.refused(FailedPrecondition, provider.volumes.delete("root-0"))
        await self.within(provider.destroy(instance.id))
        await self.within(provider.volumes.delete("root-0"))
