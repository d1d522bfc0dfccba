# SPDX-License-Identifier: Apache-2.0
"""The contract of every `IChoosesSizes`: one suite, which also makes each call twice.

The test module of a provider has, for instance::

    class AwsSizeChoicesTests(SizeChoicesContract, AwsCase, TestCase):
        pass
"""

from __future__ import annotations

from typing import cast

from zope.interface.verify import verifyObject

from infranetes.providers.interface import Size
from infranetes.providers.size_choices import IChoosesSizes, SizeChoice
from infranetes_common.errors import InvalidArgument, Unavailable
from tests.contract.pod_provider_case import ProviderCase

GIB = 1 << 30
ASKED = (Size(), Size(1500), Size(0, 3 * GIB), Size(2000, 2 * GIB, overhead_bytes=GIB))


class SizeChoicesContract(ProviderCase):
    """The promises of `IChoosesSizes`."""

    async def test_what_a_pod_would_get_is_what_it_gets(self) -> None:
        provider = await self.started()
        chooser = cast(IChoosesSizes, provider)
        for size in ASKED:
            choices = [chooser.choose_size(size, 0, 1000) for _ in range(2)]
            self.assertEqual(choices[0], choices[1])
            self.check(choices[0], size)
        launched = await self.within(provider.launch(self.spec(size=ASKED[1])))
        self.assertEqual(launched.size, chooser.choose_size(ASKED[1], 0, 1).fitting[0].name)
        for limit in (0, 1, 2):
            few = chooser.choose_size(Size(1500), 0, limit)
            self.assertLessEqual(max(len(few.fitting), len(few.cheaper)), limit)
            self.assertGreaterEqual(few.fitting_count, 1)

    def check(self, choice: SizeChoice, size: Size) -> None:
        """Check that a choice is consistent in itself."""
        needed = max(size.memory_bytes + max(choice.guest_memory, size.overhead_bytes), choice.min_memory)
        self.assertEqual((choice.needed.cpu_millis, choice.needed.memory_bytes), (size.cpu_millis, needed))
        self.assertEqual(len(choice.fitting), choice.fitting_count)
        self.assertEqual(len(choice.cheaper), choice.cheaper_count)
        self.assertTrue(choice.offers_from and choice.currency)
        for one in choice.fitting:
            self.assertEqual(one.why_not, "")
            self.assertGreaterEqual(one.cpu_millis, size.cpu_millis)
            self.assertGreaterEqual(one.memory_bytes, needed)
            self.assertEqual((one.gpus, one.architecture), (0, choice.architecture))
        prices = [one.price for one in choice.fitting if one.price is not None]
        self.assertEqual(prices, sorted(prices))
        most = choice.fitting[0].price
        for other in choice.cheaper:
            self.assertNotEqual(other.why_not, "")
            if most is not None:
                self.assertLessEqual(other.price or 0.0, most)
        self.assertTrue(all(one.price is None or one.priced_by for one in choice.fitting))

    async def test_what_can_not_be_had(self) -> None:
        unstarted = self.make_provider()
        verifyObject(IChoosesSizes, unstarted)
        for _ in range(2):
            self.assertRaises(Unavailable, cast(IChoosesSizes, unstarted).choose_size, Size(), 0, 5)
        chooser = cast(IChoosesSizes, await self.started())
        for _ in range(2):
            nothing = chooser.choose_size(self.too_big, 0, 3)
            self.assertEqual((nothing.fitting, nothing.fitting_count), ((), 0))
            self.assertEqual(len(nothing.cheaper), 3)
            self.assertRaises(InvalidArgument, chooser.choose_size, Size(-1), 0, 3)
