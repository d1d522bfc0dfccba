# SPDX-License-Identifier: Apache-2.0
"""A file with one's own prices is read again after it has changed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from twisted.internet.defer import CancelledError
from twisted.logger import LogLevel, capturedLogs, formatEvent
from twisted.trial.unittest import TestCase

from infranetes.providers.cloud.offers import own_prices
from infranetes.providers.cloud.offers.own_prices import OwnPrices
from infranetes.providers.interface import IPodProvider, Size
from infranetes.providers.size_choices import IChoosesSizes
from infranetes_common.concurrency import start
from tests.contract.pod_provider_case import reactor
from tests.infranetes.providers.cloud.case import AwsCase, OpenStackCase
from tests.support.waiting import until

LOOK_SECONDS = 0.02


class FollowingTests(TestCase):
    """A file that a user edits."""

    def setUp(self) -> None:
        self.patch(own_prices, "LOOK_SECONDS", LOOK_SECONDS)
        self.file = Path(self.mktemp())
        self.file.write_text('"a.small" = 0.1\n')
        self.prices = OwnPrices(str(self.file), "prices_file")
        self.told: list[Mapping[str, float]] = []
        self.prices.tell(self.told.append)

    def follow(self) -> None:
        following = start(self.prices.follow(reactor))
        self.addCleanup(following.cancel)
        following.addErrback(lambda failure: failure.trap(CancelledError))

    async def test_new_prices_are_told(self) -> None:
        self.follow()
        for price in (0.2, 0.3):
            self.file.write_text(f'"a.small" = {price}\n')
            await until(lambda: self.told[-1:] == [{"a.small": price}], "they are told")  # noqa: B023
        self.assertEqual(self.prices.prices, {"a.small": 0.3})

    async def test_a_file_that_is_wrong_or_gone_leaves_the_prices_from_before(
        self,
    ) -> None:
        with capturedLogs() as logged:
            self.follow()
            said = lambda: [formatEvent(each) for each in logged if each["log_level"] is LogLevel.warn]  # noqa: E731
            self.file.write_text("[")
            await until(lambda: len(said()) == 1, "it is wrong")
            self.file.unlink()
            await until(lambda: len(said()) == 2, "it is gone")
            self.file.write_text('"a.small" = 0.4\n')
            await until(lambda: self.told, "they are told")
        self.assertEqual(self.told, [{"a.small": 0.4}])
        wrong, gone = said()
        self.assertIn("is neither TOML nor", wrong)
        self.assertIn("No such file", gone)
        self.assertIn("the earlier prices stay in use", gone)

    async def test_the_same_prices_in_another_file_are_not_told(self) -> None:
        self.follow()
        before = self.file.stat()
        self.file.write_text('# the same\n"a.small" = 0.1\n')
        self.assertNotEqual(before.st_size, self.file.stat().st_size)
        await until(lambda: self.prices._version[1] != before.st_size, "it is read")
        self.file.write_text('"a.small" = 0.5\n')
        await until(lambda: self.told, "they are told")
        self.assertEqual(self.told, [{"a.small": 0.5}])


def cheapest(provider: IPodProvider, size: Size) -> str:
    """Return the size that a pod would get."""
    return IChoosesSizes(provider).choose_size(size, 0, 1).fitting[0].name


class AwsPricesTests(AwsCase, TestCase):
    """Prices that take precedence over the cloud's."""

    async def test_the_next_launch_is_chosen_by_them(self) -> None:
        self.patch(own_prices, "LOOK_SECONDS", LOOK_SECONDS)
        path = self.run_dir / "prices.toml"
        path.write_text('"m5.large" = 0.001\n')
        self.settings["prices_file"] = str(path)
        provider = await self.started()
        path.write_text('"m5.xlarge" = 0.002\n')
        size = Size(memory_bytes=1 << 30)
        await self.until(
            lambda: IChoosesSizes(provider).choose_size(size, 0, 1).fitting[0].name == "m5.xlarge",
            "it is read again",
        )
        found = await self.within(provider.launch(self.spec(size=size)))
        self.assertEqual((found.size, found.cost_per_hour), ("m5.xlarge", 0.002))


class OpenStackPricesTests(OpenStackCase, TestCase):
    """Prices for a cloud that does not publish any."""

    async def test_the_next_launch_is_chosen_by_them(self) -> None:
        self.patch(own_prices, "LOOK_SECONDS", LOOK_SECONDS)
        path = self.run_dir / "prices.toml"
        path.write_text('"m1.tiny" = 0.5\n"m1.small" = 0.9\n')
        self.settings["prices_file"] = str(path)
        provider = await self.started()
        path.write_text('"m1.tiny" = 0.5\n"m1.small" = 0.02\n')
        await self.until(
            lambda: IChoosesSizes(provider).choose_size(Size(), 0, 1).fitting[0].name == "m1.small",
            "it is read again",
        )
        found = await self.within(provider.launch(self.spec()))
        self.assertEqual((found.size, found.cost_per_hour), ("m1.small", 0.02))
