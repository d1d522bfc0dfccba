# SPDX-License-Identifier: Apache-2.0
"""Instance types, the zones that offer them, and prices, according to AWS."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase, TestCase
from zope.interface.verify import verifyObject

from infranetes.providers.cloud.aws import bundled
from infranetes.providers.cloud.aws.credentials import Keys
from infranetes.providers.cloud.aws.price_list import _MAX_PAGES, PriceList, price_of
from infranetes.providers.cloud.aws.regions import price_list
from infranetes.providers.cloud.interface import CloudError, Offer
from infranetes.providers.interface import Size
from infranetes.providers.size_choices import IChoosesSizes
from infranetes_common.errors import ConfigError
from tests.infranetes.providers.cloud.case import AwsCase
from tests.support.clouds import sigv4
from tests.support.clouds.aws_policy import statements
from tests.support.clouds.ec2_types import FEW
from tests.support.clouds.faults import FaultKind
from tests.support.clouds.moto import REGION
from tests.support.clouds.price_list import product

ASKED = ("DescribeInstanceTypes", "DescribeInstanceTypeOfferings")
PRICES = {"t3.micro": 0.0111, "t3.small": 0.0222, "m5.large": 0.0333}
REFUSED = (400, json.dumps({"__type": "AccessDeniedException", "Message": "no"}).encode())


class ToldTests(AwsCase, TestCase):
    """From EC2 and the price list."""

    def told(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.state_dir / "aws" / "offers.json").read_text())
        return found

    def asked(self) -> list[str]:  # type: ignore[override]
        return [one["Action"] for one in self.world.requests if one["Action"] in ASKED]

    def of(self, name: str) -> Any:
        [found] = [one for one in self.told()["offers"] if one["name"] == name]
        return found

    async def test_types_are_ec2s_and_prices_the_price_lists(self) -> None:
        self.world.price_list.prices = PRICES
        provider = await self.started()
        instance = await self.within(provider.launch(self.spec(size=Size(cpu_millis=2000))))
        self.assertEqual((instance.size, instance.cost_per_hour), ("m5.large", 0.0333))
        self.assertEqual(self.told()["prices"], PRICES)
        self.assertEqual(self.of("t3.medium")["cpu_millis"], 400)
        self.assertEqual(self.of("t4g.small")["architecture"], "arm64")
        self.assertEqual(self.of("g4dn.xlarge")["gpus"], 1)
        self.assertEqual(set(self.of("m5.large")["zones"]), {f"{REGION}{zone}" for zone in "abc"})

    async def test_long_lists_are_read_to_their_end(self) -> None:
        self.world.types.page = 7
        self.world.price_list.page = 5
        await self.started()
        self.assertEqual(self.asked().count(ASKED[0]), 5)
        self.assertGreater(len(self.world.price_list.requests), 3)
        self.assertEqual(len(self.told()["offers"]), len(FEW))
        self.assertEqual(self.told()["prices"]["m5.2xlarge"], _bundled_price("m5.2xlarge"))

    async def test_the_next_daemon_asks_for_nothing_within_a_day(self) -> None:
        provider = await self.started()
        asked, priced = self.asked(), len(self.world.price_list.requests)
        self.world.types.gaps = {("t3.micro", f"{REGION}{zone}") for zone in "abc"}
        provider = await self.restarted(provider)
        self.assertEqual((self.asked(), len(self.world.price_list.requests)), (asked, priced))
        self.assertEqual((await self.within(provider.launch(self.spec()))).size, "t3.micro")

    async def test_a_zone_is_not_asked_for_what_it_does_not_offer(self) -> None:
        self.world.types.gaps = {("t3.micro", f"{REGION}a")}
        provider = await self.started()
        instance = await self.running(provider, self.spec())
        self.assertEqual((instance.size, instance.zone), ("t3.micro", f"{REGION}b"))
        launches = [one for one in self.world.requests if one["Action"] == "RunInstances"]
        self.assertEqual(len(launches), 1)

    async def test_what_no_zone_in_use_offers_is_not_chosen(self) -> None:
        self.world.types.gaps = {("t3.micro", f"{REGION}{zone}") for zone in "ab"}  # only zone c offers it
        provider = await self.started()
        self.assertEqual((await self.within(provider.launch(self.spec()))).size, "t3.small")

    async def test_the_choice_is_explained(self) -> None:
        self.world.types.gaps = {("m5.large", f"{REGION}{zone}") for zone in "ab"}
        self.settings["sizes"] = ["t3.*", "m5.*", "t4g.*"]
        self.world.price_list.prices = {
            "m5.xlarge": 0.214,
            "m5.large": 0.107,
            "c5.large": 0.096,
            "t3.large": 0.0912,
            "t4g.large": 0.0736,
        }
        provider = await self.started()
        verifyObject(IChoosesSizes, provider)
        assert IChoosesSizes.providedBy(provider)
        for _ in range(2):
            choice = provider.choose_size(Size(2000, 3 << 30), 0, 100)
            self.assertEqual(choice.fitting[0].name, "m5.xlarge")
            self.assertEqual((choice.needed, choice.guest_memory), (Size(2000, 13 << 28), 1 << 28))
            self.assertEqual(choice.fitting[0].price, 0.214)
            why = {one.name: one.why_not for one in choice.cheaper}
            self.assertEqual(why["m5.large"], "none of the zones in use offers it")
            self.assertEqual(why["t3.large"], "0.6 CPUs: the baseline of its 2")
            self.assertEqual(why["c5.large"], "the configuration's sizes do not allow it")
            self.assertEqual(why["t4g.large"], "it is arm64, and the image x86_64")
            self.assertEqual(choice.cheaper_count, len(why))
            prices = [one.price or 0.0 for one in choice.cheaper]
            self.assertEqual(prices, sorted(prices, reverse=True))
            self.assertTrue(all(price <= (choice.fitting[0].price or 0.0) for price in prices))
            self.assertEqual((choice.offers_from, choice.prices_from), ("EC2", "AWS' price list"))
        self.assertEqual(len(provider.choose_size(Size(), 0, 2).fitting), 2)
        self.assertEqual(provider.choose_size(Size(), 0, 1).needed.memory_bytes, 1 << 30)
        nothing = provider.choose_size(Size(10**6), 0, 1)
        self.assertEqual((nothing.fitting, nothing.cheaper_count), ((), len(FEW)))
        self.assertEqual([one["Action"] for one in self.world.requests][-1], "DescribeInstances")

    async def test_without_permission_libclouds_tables_serve(self) -> None:
        for action in ASKED:
            self.world.faults.add(FaultKind.REVOKED, action)
        self.world.price_list.answers = [REFUSED]
        provider = await self.started()
        instance = await self.within(provider.launch(self.spec()))
        self.assertEqual((instance.size, instance.cost_per_hour), ("t3.micro", _bundled_price("t3.micro")))
        self.assertFalse((self.state_dir / "aws" / "offers.json").exists())

    async def test_without_prices_types_are_still_ec2s(self) -> None:
        for answer in (REFUSED, (200, b"<html>"), (200, b"[]"), (200, b'{"PriceList": []}'), (500, b"{}")):
            self.world.types.gaps = {("t3.micro", f"{REGION}{zone}") for zone in "ab"}
            self.world.price_list.answers = [answer] * 20
            self.settings["retry_seconds"] = 0.1
            provider = await self.started()
            instance = await self.within(provider.launch(self.spec()))
            self.assertEqual(
                (instance.size, instance.cost_per_hour), ("t3.small", _bundled_price("t3.small"))
            )
            await self.within(provider.destroy(instance.id))
            await self.within(provider.stop())
            (self.state_dir / "aws" / "offers.json").unlink()
        self.world.price_list.answers = []

    async def test_ones_own_prices_win(self) -> None:
        path = Path(self.mktemp())
        path.write_text('"m5.large" = 0.001\n"t3.small" = 1\n')
        self.settings["prices_file"] = str(path)
        provider = await self.started()
        found = await self.within(provider.launch(self.spec(size=Size(memory_bytes=1 << 30))))
        self.assertEqual((found.size, found.cost_per_hour), ("m5.large", 0.001))

    def test_a_wrong_file_of_prices_is_named(self) -> None:
        for content, suffix in (
            ("m5.large = 0.1", ".toml"),  # a table of a table
            ('"m5.large" = -1', ".toml"),
            ('"m5.large" = nan', ".toml"),
            ('"m5.large" = "cheap"', ".toml"),
            ("[", ".json"),
            ("[]", ".json"),
            ('{"m5.large": true}', ".json"),
            ("x" * ((1 << 20) + 1), ".toml"),
        ):
            path = Path(self.mktemp() + suffix)
            path.write_text(content)
            self.settings["prices_file"] = str(path)
            error = self.assertRaises(ConfigError, self.make_provider)
            self.assertIn("providers.aws.prices_file", str(error))
        self.settings["prices_file"] = "/nonexistent"
        self.assertRaises(ConfigError, self.make_provider)
        del self.settings["prices_file"]

    def test_the_manuals_policy_allows_it(self) -> None:
        allowed = {action for each in statements("c") for action in each["Action"]}
        self.assertTrue({"pricing:GetProducts", *(f"ec2:{action}" for action in ASKED)} <= allowed)

    async def test_a_launch_does_not_wait_for_prices(self) -> None:
        """An old file is used; what can't be reached is requested later."""
        provider = await self.started()
        await self.within(provider.stop())
        path = self.state_dir / "aws" / "offers.json"
        told = json.loads(path.read_text())
        path.write_text(json.dumps({**told, "offers_at": 1.0, "prices_at": 1.0}))
        for action in ASKED:
            self.world.faults.add(FaultKind.LOST, action)
        self.world.price_list.answers = [None] * 9
        before = len(self.asked())
        provider = await self.started()
        self.assertEqual((await self.within(provider.launch(self.spec()))).size, "t3.micro")
        self.assertEqual(len(self.asked()), before)
        self.world.faults.clear()
        self.world.price_list.answers = []


def _bundled_price(name: str) -> float | None:
    found: dict[str, Offer] = {offer.name: offer for offer in bundled.offers(REGION)}
    return found[name].price


class PriceTests(SynchronousTestCase):
    """How products are read."""

    def test_the_price_of_an_hour_on_demand(self) -> None:
        self.assertEqual(price_of(product("m5.large", REGION, 0.107), "USD"), ("m5.large", 0.107))
        self.assertEqual(price_of(json.loads(product("m5.large", REGION, 0.107)), "USD"), ("m5.large", 0.107))
        self.assertEqual(price_of(product("m5.large", REGION, 0.7, "CNY"), "CNY"), ("m5.large", 0.7))

    def test_what_has_no_price_is_left_out(self) -> None:
        good = product("m5.large", REGION, 0.107)
        for bad in (
            None,
            7,
            "{",
            "[]",
            product("m5.large", REGION, 0.0),
            product("m5.large", REGION, 0.7, "CNY"),
            good.replace('"Hrs"', '"Quantity"'),
            good.replace('"beginRange": "0"', '"beginRange": "100"'),
            good.replace("0.1070000000", "much"),
            good.replace('"OnDemand"', '"Reserved"'),
            good.replace('"instanceType"', '"name"'),
        ):
            self.assertIsNone(price_of(bad, "USD"), bad)


class PriceListRequestTests(SynchronousTestCase):
    """Requests to the price list, and how much of an answer is read."""

    def setUp(self) -> None:
        where = price_list("il-central-1")
        assert where is not None
        self.list = PriceList(where, Keys("AKID", "SECRET", "TOKEN"), 5.0, "")
        self.sent: list[dict[str, Any]] = []
        self.list._connection.connect()
        self.list._connection.connection.request = self.capture

    def capture(self, **request: Any) -> None:
        self.sent.append(request)
        raise ConnectionError

    def test_it_is_signed_as_aws_own_library_signs_it_and_no_secret_is_in_the_url(self) -> None:
        self.assertRaises(ConnectionError, self.list._thd_on_demand, "il-central-1", "USD")
        [request] = self.sent
        self.assertEqual((request["method"], request["url"]), ("POST", "/"))
        signature = sigv4.of(request, "pricing", "eu-central-1")
        self.assertEqual(signature.sent, signature.expected)
        self.assertIn("x-amz-security-token", signature.headers)
        self.assertEqual(request["headers"]["Host"], "api.pricing.eu-central-1.amazonaws.com")

    def test_a_list_that_does_not_end_is_not_read_for_ever(self) -> None:
        pages: list[object] = []

        def page(request: object) -> tuple[list[object], object]:
            pages.append(request)
            return [product("m5.large", REGION, 0.1)], "more"

        self.patch(self.list, "_page", page)
        self.assertRaises(CloudError, self.list._thd_on_demand, REGION, "USD")
        self.assertEqual(len(pages), _MAX_PAGES)
