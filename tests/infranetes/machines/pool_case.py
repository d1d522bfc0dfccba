# SPDX-License-Identifier: Apache-2.0
"""A node with a pool."""

from __future__ import annotations

from typing import Any

from infranetes.machines.pool_config import PoolConfig, PoolSize
from infranetes.machines.pool_record import PoolState
from infranetes.pods.store.states import SandboxState
from tests.infranetes.pods.case import PodsTestCase
from tests.infranetes.pods.fakes import FakeNode


class PoolTestCase(PodsTestCase):
    config = PoolConfig(sizes=(PoolSize(count=2),), parallel=8, per_minute=100)

    def setUp(self) -> None:
        self.world = FakeNode(pool=self.config, launch=100.0, sweep=10.0)
        self.provider = self.world.provider
        self.before()
        self.world.provider_ready()
        self.addCleanup(self.world.kill)

    def before(self) -> None:
        """Prepare the world before the provider becomes ready."""

    @property
    def pool(self) -> Any:
        return self.world.node.pools.own

    @property
    def idle(self) -> list[str]:
        return sorted(member.id for member in self.pool.idle())

    def records(self) -> dict[str, PoolState]:
        return {record.id: record.state for record in self.world.store.contents().pool}

    def assert_nothing_leaks(self) -> None:
        """Check that each VM has exactly one record and each record one VM."""
        contents = self.world.store.contents()
        pooled = [record.token for record in contents.pool]
        pods = [one.token for one in contents.sandboxes if one.state is not SandboxState.STOPPED]
        self.assertEqual(sorted(pooled + pods), sorted(one.token for one in self.provider.instances.values()))
