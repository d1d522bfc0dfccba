# SPDX-License-Identifier: Apache-2.0
"""Volumes of two tenants at OpenStack: each in its own project, and no other one's."""

from __future__ import annotations

from typing import Any

from twisted.trial.unittest import TestCase

from infranetes.providers.tenant_volumes import (
    CLAIMS_NAMESPACE,
    NodeVolumes,
    check_source,
    check_use,
    split_id,
)
from infranetes.providers.tenants import Tenant, Tenants
from infranetes.providers.volumes import FromSnapshot
from infranetes_common.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
)
from tests.infranetes.providers.cloud.openstack.test_tenants import TENANTS, TwoTenantsCase
from tests.support.clouds import cinder_schemas

GIB = 1 << 30
WHO = Tenants("openstack", (Tenant("acme", ("acme",)), Tenant("globex")))


class TenantVolumeTests(TwoTenantsCase, TestCase):
    """As the driver of volumes has them: those of the node's own project and of all tenants."""

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cinder_schemas.load()

    def leftovers(self) -> list[str]:
        for project in self.world.projects.values():
            project.api.cinder.volumes.clear()
            project.api.cinder.snapshots.clear()
        left = super().leftovers()
        assert isinstance(left, list)
        return left

    async def volumes(self) -> tuple[NodeVolumes, dict[str, Any]]:
        """Return the node's volumes, and the providers by tenant."""
        providers = {tenant: await self.of(tenant) for tenant in ("", *TENANTS)}
        its = {tenant: each.volumes for tenant, each in providers.items()}
        return NodeVolumes(its.pop(""), its, WHO), providers

    def counts(self) -> list[int]:
        apis = (self.world.api, *(self.projects[name].api for name in TENANTS))
        return [len(api.cinder.volumes) for api in apis]

    async def test_each_is_in_its_tenants_project_by_class_or_namespace(self) -> None:
        node, _ = await self.volumes()
        for number, (parameters, owner) in enumerate(
            (
                ({}, ""),
                ({CLAIMS_NAMESPACE: "default"}, ""),
                ({"tenant": "globex"}, "globex"),
                ({CLAIMS_NAMESPACE: "acme"}, "acme"),
                ({CLAIMS_NAMESPACE: "acme", "tenant": "acme"}, "acme"),
            )
        ):
            made = await self.within(node.of(parameters).create(f"pvc-{number}", GIB))
            self.assertEqual(split_id(made.id)[0], owner)
            self.assertEqual(await self.within(node.get(made.id)), made)
        self.assertEqual(self.counts(), [2, 2, 1])
        listed = [split_id(each.id)[0] for each in await self.within(node.list())]
        self.assertEqual(sorted(listed), ["", "", "acme", "acme", "globex"])
        for parameters in (
            {CLAIMS_NAMESPACE: "acme", "tenant": "globex"},
            {CLAIMS_NAMESPACE: "default", "tenant": "acme"},
            {"tenant": "nobody"},
        ):
            self.assertRaises(InvalidArgument, node.of, parameters)

    async def test_a_tenants_vm_is_given_its_own_and_no_other_ones(self) -> None:
        node, providers = await self.volumes()
        acme = await self.running(providers["acme"], self.spec())
        mine = await self.within(node.of({"tenant": "acme"}).create("mine", GIB))
        other = await self.within(node.of({"tenant": "globex"}).create("other", GIB))
        nobodys = await self.within(node.create("nobodys", GIB))
        await self.within(providers["acme"].volumes.attach(acme.id, mine.id, False))
        cinder = self.projects["acme"].api.cinder
        self.assertEqual(cinder.holders(split_id(mine.id)[1]), [acme.id])
        for volume in (other, nobodys):
            refused = providers["acme"].volumes.attach(acme.id, volume.id, False)
            self.assertIn("tenant acme has no part in it", str(await self.refused(NotFound, refused)))
            await self.within(providers["acme"].volumes.detach(acme.id, volume.id))
        await self.refused(NotFound, providers["globex"].volumes.get(mine.id))
        grown = await self.within(node.expand(mine.id, 2 * GIB))
        self.assertEqual((grown.id, grown.size), (mine.id, 2 * GIB))
        await self.within(providers["acme"].volumes.detach(acme.id, mine.id))
        for volume in (mine, other, nobodys):
            await self.within(node.delete(volume.id))
        await self.until(lambda: self.counts() == [0, 0, 0], "all are deleted")

    async def test_what_is_made_of_a_snapshot_is_its_tenants(self) -> None:
        node, _ = await self.volumes()
        made = await self.within(node.of({"tenant": "acme"}).create("data", GIB))
        taken = await self.within(node.snapshots.create("snap", made.id))
        self.assertEqual((split_id(taken.id)[0], taken.volume), ("acme", made.id))
        while not (await self.within(node.snapshots.get(taken.id))).ready:
            await self.sleep(0.05)
        source = FromSnapshot(taken.id)
        restored = await self.within(node.snapshots.restore("copy", GIB, source))
        self.assertEqual((split_id(restored.id)[0], restored.source), ("acme", source))
        check_source(node.of({"tenant": "acme"}), source)
        for others in (node.of({"tenant": "globex"}), node.of({})):
            self.assertRaises(InvalidArgument, check_source, others, source)
        [shown] = await self.within(node.snapshots.list())
        self.assertEqual(shown.id, taken.id)
        await self.within(node.snapshots.delete(taken.id))

    async def test_a_quota_and_a_credential_are_one_tenants(self) -> None:
        self.settings.update(retry_seconds=1.0)
        node, _ = await self.volumes()
        self.projects["acme"].api.cinder.limits["gigabytes"] = 0
        acme, globex = node.of({"tenant": "acme"}), node.of({"tenant": "globex"})
        self.assertIn("tenant acme", str(await self.refused(ResourceExhausted, acme.create("full", GIB))))
        kept = await self.within(globex.create("fits", GIB))
        self.world.revoke(self.projects["acme"])
        self.assertIn("credentials", str(await self.refused(FailedPrecondition, acme.create("more", GIB))))
        self.assertEqual(
            [each.id for each in await self.within(node.list())], [kept.id], "acme's are left out"
        )
        self.assertEqual(self.counts(), [0, 0, 1])
        self.world.projects[self.projects["acme"].api.project] = self.projects["acme"]

    async def test_whose_a_volume_is_counts_for_a_pod(self) -> None:
        check_use("acme:1b4e", "acme")
        check_use("1b4e", "")
        for volume, tenant in (("acme:1b4e", "globex"), ("acme:1b4e", ""), ("1b4e", "acme")):
            with self.assertRaisesRegex(FailedPrecondition, f"volume {volume} is of"):
                check_use(volume, tenant)

    async def test_those_of_a_tenant_that_is_gone_stay(self) -> None:
        node, _ = await self.volumes()
        for call in (node.get, node.delete, node.snapshots.get):
            with self.assertRaisesRegex(FailedPrecondition, "no tenant 'gone' any more"):
                call("gone:1b4e9d2c-0000-4000-8000-000000000001")
