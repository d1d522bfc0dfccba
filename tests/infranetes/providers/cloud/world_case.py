# SPDX-License-Identifier: Apache-2.0
"""Base class for tests of a provider on a simulated cloud."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any, ClassVar

from infranetes.providers.interface import Instance
from tests.contract.pod_provider_case import ProviderCase
from tests.support.clouds.world import World


class WorldCase(ProviderCase):
    """A simulated cloud for each test. :ivar settings: the provider's table, which tests change."""

    boot_timeout: ClassVar[float] = 30.0
    agent_timeout: ClassVar[float] = 60.0
    interrupt_after = (0.05, 0.5)
    world: World

    def make_world(self) -> World:
        """Return a cloud that is not started yet."""
        raise NotImplementedError

    def setUp(self) -> object:
        self.cluster = f"contract-{secrets.token_hex(4)}"  # type: ignore[misc]
        result: object = super().setUp()
        self.world = self.make_world()
        self.world.start()
        self.settings: dict[str, Any] = self.world.table()
        return result

    def table(self) -> Mapping[str, object]:
        return self.settings

    async def end_from_outside(self, instance: Instance) -> None:
        self.world.end(instance.id)

    def leftovers(self) -> list[str]:
        return self.world.holdings()

    async def until_asked(self, times: int, action: str = "") -> None:
        """Wait until the cloud has been asked so many times more: then what the answers to all but the last
        brought about has happened. :param action: for what; "": for anything."""
        calls = self.world.faults.calls

        def asked() -> int:
            return calls.get(action, 0) if action else sum(calls.values())

        before = asked()
        await self.until(lambda: asked() >= before + times, f"{action or 'anything'}, {times} times more")

    async def finish(self) -> None:
        await self.world.stop()
