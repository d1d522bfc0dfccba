"""The ground of tests of the daemon with pods on a simulated EC2."""

from __future__ import annotations

import secrets

from tests.infranetes.daemon.case import DaemonCase, reactor
from tests.support.clouds.aws import AwsWorld


class AwsDaemonCase(DaemonCase):
    """A world for each test, in which nothing is left when it is over."""

    timeout = 300

    def setUp(self) -> None:
        super().setUp()
        self.world = AwsWorld(reactor, self.root / "machines")
        self.world.start()
        self.config.update(provider="aws", providers={"aws": self.world.table()})
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
