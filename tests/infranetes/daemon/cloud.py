# SPDX-License-Identifier: Apache-2.0
"""The base of tests of the daemon with pods on a simulated cloud."""

from __future__ import annotations

import secrets
from typing import Any, ClassVar

from tests.infranetes.daemon.case import DaemonCase, reactor


class CloudDaemonCase(DaemonCase):
    """A simulated cloud for each test; after the test, nothing may be left in it.

    :cvar provider: the provider's name. :cvar make_world: the simulated cloud's class.
    """

    timeout = 300
    provider: ClassVar[str]
    make_world: ClassVar[Any]

    def setUp(self) -> None:
        super().setUp()
        self.world = self.make_world(reactor, self.root / "machines")
        self.world.start()
        self.config.update(provider=self.provider, providers={self.provider: self.world.table()})
        self.config["cluster"] = f"test-{secrets.token_hex(4)}"
        self.config["times"] = {"sweep": 1.0}

    async def end_everything(self) -> None:
        await super().end_everything()
        try:
            self.assertEqual(self.world.holdings(), [])
        finally:
            await self.world.stop()

    async def nothing_is_left(self) -> None:
        await self.until(lambda: not self.world.holdings(), "nothing is left", 30.0)
