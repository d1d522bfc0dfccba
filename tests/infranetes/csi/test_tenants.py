# SPDX-License-Identifier: Apache-2.0
"""The CSI driver where a provider has tenants: a StorageClass, or a claim's namespace, says which one."""

from __future__ import annotations

from infranetes.providers.qemu.volumes.volumes import QemuVolumes
from infranetes.providers.tenant_volumes import CLAIMS_NAMESPACE, NodeVolumes, TenantVolumes
from infranetes.providers.tenants import Tenant, Tenants
from infranetes.providers.volumes import IVolumes
from infranetes_common.wire import csi
from tests.infranetes.csi.case import NODE, CsiCase, reactor, without_vms
from txgrpc import Code


class TenantTests(CsiCase):
    async def make_volumes(self) -> IVolumes:
        own, acme = (
            QemuVolumes(reactor, self.root / name, NODE, without_vms()) for name in ("volumes", "acme")
        )
        who = Tenants("cloud", (Tenant("acme", ("acme",)),))
        return NodeVolumes(own, {"acme": TenantVolumes("acme", acme)}, who)

    def files(self) -> list[int]:
        return [len(list((self.root / name).glob("*.raw"))) for name in ("volumes", "acme")]

    async def test_a_volume_is_made_found_and_deleted_where_its_tenants_are(self) -> None:
        made = await self.create(parameters={"tenant": "acme"})
        again = await self.create(parameters={CLAIMS_NAMESPACE: "acme"})
        self.assertTrue(made.volume_id.startswith("acme:"), made.volume_id)
        self.assertEqual((again.volume_id, self.files()), (made.volume_id, [0, 1]))
        own = await self.create("other")
        self.assertEqual(self.files(), [1, 1])
        listed = await self.controller.ListVolumes(csi.ListVolumesRequest(), timeout=60)
        found = {each.volume.volume_id for each in listed.entries}
        self.assertEqual(found, {made.volume_id, own.volume_id})
        await self.publish(made.volume_id)
        await self.unpublish(made.volume_id)
        for id in found:
            await self.controller.DeleteVolume(csi.DeleteVolumeRequest(volume_id=id), timeout=60)
        self.assertEqual(self.files(), [0, 0])

    async def test_what_a_claim_may_not_have_is_refused(self) -> None:
        for parameters, words in (
            ({"tenant": "nobody"}, "there is no tenant 'nobody'; known: acme"),
            ({"tenant": "acme", CLAIMS_NAMESPACE: "default"}, "tenants.acme.namespaces"),
            ({"tennant": "acme"}, "'tennant' is unknown"),
        ):
            await self.refused(Code.INVALID_ARGUMENT, self.create(parameters=parameters), words)
        self.assertEqual(self.files(), [0, 0])
