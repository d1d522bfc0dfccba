# SPDX-License-Identifier: Apache-2.0
"""Sizes of huge pages by their names, and what limits ask for."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.errors import InvalidArgument
from infranetes_common.huge_pages import limit_name, page_bytes, pages_of, resource_name
from infranetes_common.wire import cri

NAMES = {64 << 10: ("64KB", "hugepages-64Ki"), 2 << 20: ("2MB", "hugepages-2Mi"),
         512 << 20: ("512MB", "hugepages-512Mi"), 16 << 30: ("16GB", "hugepages-16Gi")}  # fmt: skip


class HugePageTests(SynchronousTestCase):
    def test_a_size_has_two_names(self) -> None:
        for size, (limit, resource) in NAMES.items():
            self.assertEqual((limit_name(size), resource_name(size)), (limit, resource))
            self.assertEqual(page_bytes(limit), size)

    def test_what_is_no_size_is_refused_by_name(self) -> None:
        for name in ("", "2", "2M", "2MiB", "-2MB", "2mb", "../2MB", "1234567MB"):
            error = self.assertRaises(InvalidArgument, page_bytes, name)
            self.assertIn(repr(name), str(error))

    def test_limits_ask_for_whole_pages(self) -> None:
        asked = {"2MB": (5 << 20), "1GB": 1 << 30, "64KB": 65535, "512MB": 0, "0MB": 7}
        limits = [cri.HugepageLimit(page_size=name, limit=limit) for name, limit in asked.items()]
        found = pages_of(cri.LinuxContainerResources(hugepage_limits=limits))
        self.assertEqual(found, {2 << 20: 2, 1 << 30: 1})
        self.assertEqual(pages_of(cri.LinuxContainerResources()), {})

    def test_a_size_that_is_named_twice_counts_once(self) -> None:
        limits = [cri.HugepageLimit(page_size=name, limit=4 << 20) for name in ("2MB", "2048KB")]
        self.assertEqual(pages_of(cri.LinuxContainerResources(hugepage_limits=limits)), {2 << 20: 2})
