# SPDX-License-Identifier: Apache-2.0
"""Upgrades and downgrades of a node whose pods are VMs of QEMU."""

from __future__ import annotations

from collections.abc import Mapping

from twisted.internet.threads import deferToThread

from tests.e2e.pod_case import PodCase
from tests.infranetes.daemon.case import ROOT
from tests.infranetes.daemon.upgrade_case import UpgradeCase
from tests.support.releases import previous_release


class QemuUpgradeTests(PodCase, UpgradeCase):
    """Daemons of both releases over the same VMs, which the first of them launched from this guest image."""

    timeout = 1500  # each release makes a template

    async def vms(self) -> list[Mapping[str, str]]:
        return [{"tap": line} for line in self.taps().splitlines()]

    async def test_this_release_goes_on_with_the_vms_of_the_one_before(self) -> None:
        await self.lives_on(await deferToThread(previous_release), ROOT)

    async def test_the_release_before_goes_on_with_the_vms_of_this_one(self) -> None:
        await self.lives_on(ROOT, await deferToThread(previous_release))
