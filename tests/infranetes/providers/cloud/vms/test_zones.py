# SPDX-License-Identifier: Apache-2.0
"""A VM with volumes is launched in their zone, or refused."""

from __future__ import annotations

from twisted.trial.unittest import TestCase

from infranetes_common.errors import FailedPrecondition
from tests.infranetes.providers.cloud.case import AwsCase, Call, CloudCase, GcpCase
from tests.support.clouds import moto
from tests.support.clouds.faults import FaultKind
from tests.support.clouds.gce_resources import ZONES

SUBNET_ZONES = (f"{moto.REGION}a", f"{moto.REGION}b")


class ZoneTests:
    """The tests for each cloud with zones."""

    class Case(CloudCase, TestCase):
        volume_zones: tuple[str, ...]  # of the volumes, in the order of `zones`

        def launches(self) -> list[Call]:
            return [call for call in self.world.requests if call["Action"] == self.launch_action]

        async def test_a_vm_is_launched_where_its_volumes_are_and_says_so(self) -> None:
            provider = await self.started()
            for place, zone in zip(self.zones(), self.volume_zones, strict=True):
                launched = await self.within(provider.launch(self.spec(zone=zone)))
                self.assertEqual(self.asked(self.launches()[-1])[1], place)
                self.assertEqual(launched.zone, zone)
                [listed] = [one for one in await self.within(provider.list()) if one.id == launched.id]
                self.assertEqual(listed.zone, zone)

        async def test_no_other_zone_is_tried_when_that_one_is_full(self) -> None:
            provider = await self.started()
            self.world.faults.add(FaultKind.CAPACITY, self.launch_action, times=1)
            launched = await self.within(provider.launch(self.spec(zone=self.volume_zones[1])))
            places = {self.asked(each)[1] for each in self.launches()}
            self.assertEqual((places, launched.zone), ({self.zones()[1]}, self.volume_zones[1]))
            self.assertEqual(len({self.asked(each)[0] for each in self.launches()}), 2, "another size is")

        async def test_a_zone_in_which_no_vm_is_launched_is_refused_and_the_others_named(self) -> None:
            provider = await self.started()
            spec = self.spec(zone="nowhere-1x")
            for _ in range(2):
                error = await self.refused(FailedPrecondition, provider.launch(spec))
                for word in ("nowhere-1x", *self.volume_zones, f"providers.{self.provider_name}"):
                    self.assertIn(word, str(error))
            self.assertEqual(self.launches(), [])


class AwsZoneTests(AwsCase, ZoneTests.Case):
    """Subnets in the zone of the volumes."""

    volume_zones = SUBNET_ZONES

    async def test_a_subnet_that_a_pod_names_has_to_be_of_the_volumes_zone(self) -> None:
        self.settings["allowed_subnets"] = ["subnet-*"]
        provider = await self.started()
        annotations = {"infranetes.io/subnet": self.world.subnets[1]}
        for zone, there in zip(SUBNET_ZONES, (False, True), strict=True):
            launch = provider.launch(self.spec(zone=zone, annotations=annotations))
            if there:
                self.assertEqual((await self.within(launch)).zone, zone)
            else:
                self.assertIn("infranetes.io/subnet", str(await self.refused(FailedPrecondition, launch)))

    async def test_the_default_vpc_is_asked_for_a_zone(self) -> None:
        self.settings.update(subnets=[], security_groups=[])
        provider = await self.started()
        await self.within(provider.launch(self.spec()))
        launched = await self.within(provider.launch(self.spec(zone=SUBNET_ZONES[1])))
        anywhere, there = self.launches()
        self.assertEqual(
            [one.get("Placement.AvailabilityZone") for one in (anywhere, there)], [None, SUBNET_ZONES[1]]
        )
        self.assertNotIn("SubnetId", there)
        self.assertEqual(launched.zone, SUBNET_ZONES[1])


class GcpZoneTests(GcpCase, ZoneTests.Case):
    """Zones of the configuration."""

    volume_zones = tuple(ZONES)
