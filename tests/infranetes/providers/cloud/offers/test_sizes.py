# SPDX-License-Identifier: Apache-2.0
"""Which size of VM a pod gets."""

from __future__ import annotations

from functools import partial
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from infranetes.providers.annotations import Wishes
from infranetes.providers.cloud.aws.bundled import offers
from infranetes.providers.cloud.aws.burstable import lasting_millis
from infranetes.providers.cloud.aws.quotas import quota_of
from infranetes.providers.cloud.interface import Offer
from infranetes.providers.cloud.offers.sizes import choose, estimated_prices, need_of
from infranetes.providers.confidential import Confidential
from infranetes.providers.interface import Size
from infranetes_common.errors import InvalidArgument

GIB = 1 << 30
OFFERS = (
    Offer("a.small", 1000, 1 * GIB, 0.01),
    Offer("a.large", 2000, 4 * GIB, 0.04),
    Offer("b.large", 2000, 4 * GIB, 0.03),
    Offer("c.huge", 8000, 64 * GIB, None),
    Offer("g.gpu", 8000, 64 * GIB, 1.0, gpus=2),
    Offer("r.arm", 1000, 2 * GIB, 0.001, architecture="arm64"),
)


class SizeTests(SynchronousTestCase):
    def names(self, size: Size, wishes: Wishes = Wishes(), allowed: Any = ()) -> list[str]:  # noqa: B008
        need = need_of(size, wishes, allowed=allowed, guest_memory=256 << 20, architecture="x86_64")
        return [one.name for one in choose(OFFERS, need)]

    def test_cheapest_first_and_without_a_price_last(self) -> None:
        self.assertEqual(self.names(Size()), ["a.small", "b.large", "a.large", "c.huge"])
        huge = Size(memory_bytes=GIB, huge_bytes=40 * GIB)
        self.assertEqual(self.names(huge), ["c.huge"])
        self.assertEqual(self.names(Size(cpu_millis=1001)), ["b.large", "a.large", "c.huge"])

    def test_the_guest_needs_memory_too(self) -> None:
        self.assertEqual(self.names(Size(memory_bytes=1 * GIB))[0], "b.large")

    def test_a_pods_overhead_is_for_the_guest_and_counted_once(self) -> None:
        for overhead, first in ((0, "a.small"), (256, "a.small"), (512, "a.small"), (513, "b.large")):
            size = Size(memory_bytes=GIB // 2, overhead_bytes=overhead << 20)
            self.assertEqual(self.names(size)[0], first, overhead)

    def test_a_vm_has_a_least_memory_unless_its_size_is_named(self) -> None:
        needed = partial(need_of, allowed=(), guest_memory=256 << 20, architecture="x86_64")
        for least, asked, first in (
            (GIB, 0, "a.small"),
            (GIB + 1, 0, "b.large"),
            (2 * GIB, GIB // 2, "b.large"),
            (2 * GIB, 8 * GIB, "c.huge"),
        ):
            [found, *_] = choose(OFFERS, needed(Size(memory_bytes=asked), Wishes(), min_memory=least))
            self.assertEqual(found.name, first, (least, asked))
        [named] = choose(OFFERS, needed(Size(), Wishes(instance_type="a.small"), min_memory=8 * GIB))
        self.assertEqual(named.name, "a.small")

    def test_only_allowed_sizes_are_chosen(self) -> None:
        self.assertEqual(self.names(Size(), allowed=("b.*", "c.hug?")), ["b.large", "c.huge"])
        for wishes, size in ((Wishes(), Size(cpu_millis=9000)), (Wishes(instance_type="a.small"), Size())):
            self.assertRaises(InvalidArgument, self.names, size, wishes, ("b.*",))

    def test_a_pod_may_choose_a_size(self) -> None:
        self.assertEqual(self.names(Size(cpu_millis=9000), Wishes(instance_type="a.small")), ["a.small"])

    def test_gpus_only_where_they_are_asked_for(self) -> None:
        self.assertEqual(self.names(Size(), Wishes(gpus=1)), ["g.gpu"])
        self.assertRaises(InvalidArgument, self.names, Size(), Wishes(gpus=3))

    def test_confidential_vms_are_of_sizes_that_can_be_and_no_others_of_those_that_must(self) -> None:
        snp = (Confidential.SEV_SNP,)
        sizes = (
            Offer("a.plain", 1000, 4 * GIB, 0.01),
            Offer("b.must", 1000, 4 * GIB, 0.02, confidential=snp, always_confidential=True),
            Offer("c.can", 1000, 4 * GIB, 0.03, confidential=snp),
            Offer("d.other", 1000, 4 * GIB, 0.01, confidential=(Confidential.TDX,)),
        )
        for wishes, expected in (
            (Wishes(), ["a.plain", "d.other", "c.can"]),
            (Wishes(confidential=Confidential.SEV_SNP), ["b.must", "c.can"]),
            (Wishes(confidential=Confidential.TDX), ["d.other"]),
            (Wishes(confidential=Confidential.SEV_SNP, instance_type="c.can"), ["c.can"]),
        ):
            need = need_of(Size(), wishes, allowed=(), guest_memory=GIB, architecture="x86_64")
            self.assertEqual([each.name for each in choose(sizes, need)], expected, wishes)
        for name, confidential, words in (
            ("a.plain", Confidential.SEV_SNP, "can't be confidential by sev-snp"),
            ("b.must", None, "its VMs are confidential, which is not asked for"),
            ("e.none", None, "the cloud has no such type"),
            ("", Confidential.TDX, "confidential by tdx"),
        ):
            wishes = Wishes(confidential=confidential, instance_type=name)
            need = need_of(Size(), wishes, allowed=(), guest_memory=GIB, architecture="x86_64")
            error = self.assertRaises(InvalidArgument, choose, sizes[:3], need)
            self.assertIn(words, str(error))

    def test_a_gap_in_the_list_of_prices_is_filled_from_the_family(self) -> None:
        family = (Offer("t.small", 1000, GIB, 0.02), Offer("t.large", 2000, 4 * GIB))
        self.assertEqual(estimated_prices(family), {"t.small": 0.02, "t.large": 0.08})

    def test_burstable_types_count_with_the_part_of_their_cpus_that_lasts(self) -> None:
        found = {one.name: one for one in offers("eu-west-1")}
        for name, millis, vcpus in (
            ("t2.nano", 50, 1),
            ("t2.2xlarge", 1360, 8),
            ("t3.nano", 100, 2),
            ("t3a.medium", 400, 2),
            ("t4g.xlarge", 1600, 4),
            ("m5.large", 2000, 0),
        ):
            self.assertEqual((found[name].cpu_millis, found[name].shared_cpus), (millis, vcpus), name)
        self.assertEqual(lasting_millis("t9.large", 2), 100)  # newer than the table

    def test_types_of_ec2_that_share_a_limit_of_vcpus(self) -> None:
        found = {one.name: one.quota for one in offers("eu-west-1")}
        for names, quota in (
            (("t3.nano", "m5.large", "c5.large", "r5.large", "i3.large", "im4gn.large"), "Standard"),
            (("g4dn.xlarge", "g5.xlarge"), "G and VT"),
            (("p3.2xlarge",), "P"),
            (("inf1.xlarge",), "Inf"),
            (("x1e.xlarge", "x2idn.16xlarge"), "X"),
            (("u-6tb1.metal",), "High Memory"),
        ):
            for name in names:
                self.assertEqual(found.get(name, quota_of(name)), quota, name)

    @given(st.integers(0, 200_000), st.integers(0, 2000))
    def test_chosen_sizes_of_ec2_fit(self, cpu: int, gib: int) -> None:
        size = Size(cpu, gib * GIB)
        try:
            need = need_of(size, Wishes(), allowed=(), guest_memory=0, architecture="x86_64")
            found = choose(offers("eu-west-1"), need)
        except InvalidArgument:
            return
        for one in found:
            self.assertTrue(one.cpu_millis >= cpu and one.memory_bytes >= gib * GIB and not one.gpus)
