# SPDX-License-Identifier: Apache-2.0
"""Machine types, the zones that have them, and prices, according to Google."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase, TestCase

from infranetes.providers.cloud.gcp.price_list import _MAX_PAGES, PriceList, Rates, rate_of
from infranetes.providers.cloud.gcp.sizes import prices
from infranetes.providers.cloud.interface import CloudError, Offer
from infranetes.providers.interface import Size
from infranetes.providers.size_choices import IChoosesSizes
from tests.infranetes.providers.cloud.case import GcpCase
from tests.support.clouds.gce_price_list import sku
from tests.support.clouds.gce_resources import REGION, ZONES

GIB = 1 << 30
CORE, RAM = "E2 Instance Core running in Belgium", "E2 Instance Ram running in Belgium"


class ToldTests(GcpCase, TestCase):
    """From Compute Engine and the price list."""

    def told(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.state_dir / "gcp" / "offers.json").read_text())
        return found

    async def test_prices_are_made_of_those_of_cores_and_memory(self) -> None:
        self.world.price_list.skus = [sku(CORE, "h", 0.02), sku(RAM, "GiBy.h", 1.25)]
        provider = await self.started()
        for size, name, price in (
            (Size(), "e2-micro", 0.25 * 0.02 + 1.25),
            (Size(cpu_millis=2000), "e2-standard-2", 2 * 0.02 + 8 * 1.25),
        ):
            instance = await self.within(provider.launch(self.spec(size=size)))
            self.assertEqual(instance.size, name)
            self.assertAlmostEqual(instance.cost_per_hour or 0.0, price)
        zones = {one["name"]: one["zones"] for one in self.told()["offers"]}
        self.assertEqual((zones["e2-micro"], zones["e2-standard-8"]), (list(ZONES), [ZONES[0]]))

    async def test_long_lists_are_read_to_their_end_with_a_token_of_their_own(self) -> None:
        self.world.price_list.page = 7
        provider = await self.started()
        self.assertEqual(len(self.world.price_list.requests), 6)
        assert IChoosesSizes.providedBy(provider)
        [found] = provider.choose_size(Size(cpu_millis=2000), 0, 1).fitting
        self.assertEqual((found.name, found.priced_by), ("e2-standard-2", "Google's price list"))
        self.assertAlmostEqual(found.price or 0.0, 2 * _listed("cpu") + 8 * _listed("ram"))

    async def test_without_the_api_libclouds_prices_serve(self) -> None:
        self.world.price_list.enabled = False
        provider = await self.started()
        instance = await self.within(provider.launch(self.spec(size=Size(cpu_millis=2000))))
        self.assertAlmostEqual(instance.cost_per_hour or 0.0, 2 * _listed("cpu") + 8 * _listed("ram"))
        self.assertEqual(self.told()["prices_at"], 0.0)

    async def test_malformed_answers_are_no_prices(self) -> None:
        self.settings["retry_seconds"] = 0.1
        for body in (b"<html>", b"[]", b"{}", b'{"skus": 1}', b'{"skus": [1, null, {}]}'):
            self.world.price_list.answers = [(200, body)] * 9
            await (await self.started()).stop()
            self.assertEqual(self.told()["prices_at"], 0.0, body)
        self.world.price_list.answers = []

    async def test_the_next_daemon_knows_what_was_told(self) -> None:
        provider = await self.started()
        asked = len([one for one in self.world.requests if one["Action"] == "get machineTypes"])
        self.assertEqual(asked, len(ZONES))
        provider = await self.restarted(provider)
        self.assertEqual((await self.within(provider.launch(self.spec()))).size, "e2-micro")
        again = len([one for one in self.world.requests if one["Action"] == "get machineTypes"])
        self.assertEqual((again, len(self.world.price_list.requests)), (asked, 1))

    async def test_ones_own_prices_win(self) -> None:
        path = Path(self.mktemp() + ".json")
        path.write_text('{"e2-standard-4": 0.0001}')
        self.settings["prices_file"] = str(path)
        found = await self.within((await self.started()).launch(self.spec()))
        self.assertEqual((found.size, found.cost_per_hour), ("e2-standard-4", 0.0001))


def _listed(part: str) -> float:
    return float(prices()["e2"][part]["on_demand"][REGION]["price"])


class RateTests(SynchronousTestCase):
    """How SKUs are read."""

    def test_whose_price_it_is(self) -> None:
        for words, expected in (
            ("N2 Instance Core running in Belgium", ("n2", "Core")),
            ("N2D AMD Instance Ram running in Belgium", ("n2d", "Ram")),
            ("N1 Predefined Instance Core running in EMEA", ("n1", "Core")),
            ("C4A Arm Instance Ram running in Belgium", ("c4a", "Ram")),
            ("Compute optimized Core running in Belgium", ("c2", "Core")),
            ("Micro Instance with burstable CPU running in EMEA", ("f1-micro", "")),
            ("Small Instance with 1 VCPU running in EMEA", ("g1-small", "")),
        ):
            unit = "GiBy.h" if expected[1] == "Ram" else "h"
            self.assertEqual(rate_of(sku(words, unit, 1.5), REGION), (*expected, 1.5), words)

    def test_what_is_something_else_is_left_out(self) -> None:
        good = sku(CORE, "h", 0.02)

        def changed(change: Callable[[Any], object]) -> Any:
            copy = json.loads(json.dumps(good))
            change(copy)
            return copy

        self.assertIsNotNone(rate_of(good, REGION))
        wrong: tuple[object, ...] = (
            None,
            [],
            {},
            sku(f"Spot Preemptible {CORE}", "h", 0.01),
            sku("N2 Custom Instance Core running in Belgium", "h", 0.01),
            sku("N2 Sole Tenancy Instance Core running in Belgium", "h", 0.01),
            sku("Commitment v1: E2 Cpu in Belgium for 1 Year", "h", 0.01),
            sku(CORE, "GiBy.h", 0.02),
            sku(CORE, "h", 0.0),
            sku(CORE, "h", 0.02, region="us-central1"),
            sku(CORE, "h", 0.02, usage="Preemptible"),
            changed(lambda one: one["pricingInfo"].clear()),
            changed(lambda one: one.pop("category")),
            changed(lambda one: one.update(serviceRegions=None)),
            changed(
                lambda one: one["pricingInfo"][0]["pricingExpression"]["tieredRates"][0]["unitPrice"].update(
                    currencyCode="EUR"
                )
            ),
        )
        for bad in wrong:
            self.assertIsNone(rate_of(bad, REGION), bad)

    def test_types_with_more_than_cores_and_memory_have_no_price(self) -> None:
        rates = Rates({("g2", "Core"): 1.0, ("g2", "Ram"): 1.0, ("c3", "Core"): 1.0}, {"f1-micro": 0.5})
        for offer, price in (
            (Offer("g2-standard-4", 4000, GIB), 5.0),
            (Offer("g2-standard-4", 4000, GIB, gpus=1), None),
            (Offer("g2-standard-4-lssd", 4000, GIB), None),
            (Offer("c3-standard-4", 4000, GIB), None),
            (Offer("f1-micro", 200, GIB), 0.5),
        ):
            self.assertEqual(rates.of(offer), price, offer)

    def test_a_list_that_does_not_end_is_not_read_for_ever(self) -> None:
        class Token:
            access_token = "t"

        asked: list[object] = []

        def request(*args: object, **options: object) -> Namespace:
            asked.append(options)
            return Namespace(object={"skus": [], "nextPageToken": "more"})

        found = PriceList(Token(), 1.0, "")
        self.patch(found._connection, "request", request)
        self.assertRaises(CloudError, found._thd_rates, REGION)
        self.assertEqual(len(asked), _MAX_PAGES)
