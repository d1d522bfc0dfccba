# SPDX-License-Identifier: Apache-2.0
"""Soak test: daemons that are killed create, attach, detach and delete volumes on simulated clouds.

`make bench BENCHES=volumes` runs more.
"""

from __future__ import annotations

from twisted.trial.unittest import TestCase

from infranetes.providers.cloud.aws.bundled import offers
from infranetes.providers.cloud.gcp.sizes import prices
from infranetes_common.reactors import installed
from tests.harness.days import today
from tests.harness.durations import slow
from tests.harness.needs import needs_tools, nightly
from tests.support.clouds.moto import REGION
from tests.support.infrastructure import SOUND
from tests.support.volume_soak import VolumeSoak

reactor = installed()
offers(REGION)  # reads libcloud's large files, which the daemon does before its reactor runs
prices()


class SoakCase(TestCase):
    timeout = 300

    async def check(self, provider: str, lives: int, seconds: float) -> None:
        cloud = SOUND[provider]
        outcome = await VolumeSoak(reactor, cloud, lives, width=1, seed=today(), seconds=seconds).run()
        self.assertEqual((outcome.leaked, outcome.twice, outcome.lost), ([], [], []))
        self.assertGreaterEqual(outcome.lives, 1)
        self.assertGreaterEqual(outcome.kills, 1)


@needs_tools("wheels")
class ShortSoakTests(SoakCase):
    async def test_on_the_cloud_of_the_day(self) -> None:
        await self.check(("aws", "azure", "gcp", "openstack")[today() % 4], lives=1, seconds=1.0)


@nightly
@slow(15, "daemons are killed at one call after another for ten seconds")
class VolumeSoakTests(SoakCase):
    async def test_on_ec2(self) -> None:
        await self.check("aws", lives=3, seconds=10.0)

    @needs_tools("wheels")
    async def test_on_azure(self) -> None:
        await self.check("azure", lives=3, seconds=10.0)

    async def test_on_compute_engine(self) -> None:
        await self.check("gcp", lives=3, seconds=10.0)

    @needs_tools("wheels")
    async def test_on_openstack(self) -> None:
        await self.check("openstack", lives=3, seconds=10.0)

    @needs_tools("vcsim")
    async def test_on_vsphere(self) -> None:
        await self.check("vsphere", lives=3, seconds=10.0)
