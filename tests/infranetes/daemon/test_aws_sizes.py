# SPDX-License-Identifier: Apache-2.0
"""`infranetes-ctl sizes` with a daemon on a simulated EC2; the daemon is killed."""

from __future__ import annotations

import contextlib
import io
import json
from typing import Any

from infranetes.ctl.cli import DONE, FAILED, ask, parser, socket_of
from tests.harness.needs import needs_registry
from tests.infranetes.daemon.case import reactor
from tests.infranetes.daemon.cloud import CloudDaemonCase
from tests.support.clouds.aws import SimulatedAws

PRICES = {"t3.large": 0.05, "m5.large": 0.07, "m5.xlarge": 0.14}


@needs_registry
class SizesTests(CloudDaemonCase):
    provider = "aws"
    make_world = SimulatedAws

    async def sizes(self, *arguments: str, code: int = DONE) -> Any:
        """Run `infranetes-ctl sizes`. Return what it prints."""
        words = ["sizes", *arguments, "--json", "--config", str(self.root / "infranetes.toml")]
        options, out = parser().parse_args(words), io.StringIO()
        with contextlib.redirect_stdout(out):
            self.assertEqual(await ask(reactor, socket_of(options), options), code)
        return json.loads(out.getvalue())

    def asked(self) -> int:
        """Return how often daemons have called EC2 for types and prices."""
        types = [one for one in self.world.requests if one["Action"] == "DescribeInstanceTypes"]
        return len(types) + len(self.world.price_list.requests)

    async def test_what_aws_has_told_is_said_by_the_next_daemon_too(self) -> None:
        self.world.price_list.prices = PRICES
        await self.start()
        for again in (False, True):
            if again:
                await self.kill()
                await self.start()
            said = await self.sizes("--cpu", "2", "--memory", "4Gi")
            self.assertEqual((said["provider"], said["needed"]["memory_bytes"]), ("aws", 17 << 28))
            found = [(one["name"], one["price_per_hour"]) for one in said["fitting"]]
            self.assertEqual(found[:2], [("m5.large", 0.07), ("m5.xlarge", 0.14)])
            [large] = [one for one in said["cheaper"] if one["name"] == "t3.large"]
            self.assertEqual(large["why_not"], "0.6 CPUs: the baseline of its 2")
            self.assertEqual((said["sizes"]["from"], said["prices"]["from"]), ("EC2", "AWS' price list"))
            self.assertEqual(self.asked(), 2)
        await self.sizes("--cpu", "2000", code=FAILED)
