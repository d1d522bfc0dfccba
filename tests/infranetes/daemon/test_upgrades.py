# SPDX-License-Identifier: Apache-2.0
"""Upgrades and downgrades of a node: daemons and agents of this release and of the previous one."""

from __future__ import annotations

import contextlib
import sqlite3

from twisted.internet.threads import deferToThread

from infranetes.pods.store.database import SCHEMA
from infranetes.pods.store.store import FILE
from infranetes_common.wire import cri
from tests.harness.needs import needs_registry
from tests.infranetes.daemon.case import ROOT
from tests.infranetes.daemon.upgrade_case import UpgradeCase
from tests.support.releases import previous_release

READY = cri.PodSandboxStateValue(state=cri.SANDBOX_READY)


@needs_registry
class UpgradeTests(UpgradeCase):
    """Daemons of both releases over the same directory, one after the other; the first launched the VMs."""

    async def test_this_release_goes_on_with_the_pods_of_the_one_before(self) -> None:
        await self.lives_on(await deferToThread(previous_release), ROOT)

    async def test_the_release_before_goes_on_with_the_pods_of_this_one(self) -> None:
        await self.lives_on(ROOT, await deferToThread(previous_release))

    async def test_the_release_before_refuses_a_store_of_a_later_schema_and_leaves_all_as_it_is(self) -> None:
        """As the previous release would refuse this one's, if this release had changed the schema."""
        await self.start()
        pod = await self.run_pod()
        await self.kill()
        later = SCHEMA + 1
        self.schema(later)
        self.tree = await deferToThread(previous_release)
        self.process = self.spawn()
        self.assertNotEqual(await self.ended(60.0), 0)
        words = rf"has schema {later}, this release knows \d+ alone: install the release that wrote it again"
        self.assertRegex(self.log, words)
        self.assertEqual(len(await self.vms()), 1)
        self.schema(SCHEMA)
        self.tree = ROOT
        await self.start()
        self.assertEqual([each.id for each in await self.sandboxes(state=READY)], [pod])

    def schema(self, number: int) -> None:
        """Set the schema number in the store."""
        with contextlib.closing(sqlite3.connect(self.root / "state" / FILE)) as connection:
            connection.execute(f"PRAGMA user_version = {number}")
