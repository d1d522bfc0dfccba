# SPDX-License-Identifier: Apache-2.0
"""Lists sent in pages."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from hypothesis import given
from hypothesis import strategies as st
from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from infranetes.cri import paging
from infranetes.cri.translate import framed
from infranetes_common.wire import cri

ITEMS = st.lists(st.integers(0, 3).map(lambda size: b"x" * (size * paging.MAX_BYTES // 2)), max_size=10)


class PageTests(SynchronousTestCase):
    """Pages of messages that are already framed."""

    def test_of_nothing_there_is_no_message(self) -> None:
        self.assertEqual(list(paging.pages([])), [])

    def test_at_most_so_many_items(self) -> None:
        items = [framed(cri.PodSandbox(id=str(number))) for number in range(2 * paging.MAX_ITEMS + 1)]
        found = [cri.StreamPodSandboxesResponse.FromString(page) for page in paging.pages(items)]
        self.assertEqual([len(one.pod_sandboxes) for one in found], [paging.MAX_ITEMS, paging.MAX_ITEMS, 1])
        ids = [one.id for message in found for one in message.pod_sandboxes]
        self.assertEqual(ids, [str(number) for number in range(len(items))])

    @given(ITEMS)
    def test_all_is_there_in_its_order_and_no_message_is_too_large(self, items: list[bytes]) -> None:
        found = list(paging.pages(items))
        self.assertEqual(b"".join(found), b"".join(items))
        for page in found:
            self.assertTrue(len(page) <= paging.MAX_BYTES or page in items)

    @given(ITEMS)
    def test_from_a_generator_it_is_the_same(self, items: list[bytes]) -> None:
        async def one_by_one() -> AsyncGenerator[bytes, None]:
            for item in items:
                yield item

        async def all_of() -> list[bytes]:
            return [page async for page in paging.pages_of(one_by_one())]

        found = self.successResultOf(Deferred.fromCoroutine(all_of()))
        self.assertEqual(found, list(paging.pages(items)))

    def test_closed_early_it_closes_what_it_reads_from(self) -> None:
        closed = []

        async def endless() -> AsyncGenerator[bytes, None]:
            try:
                while True:
                    yield b"x" * paging.MAX_BYTES
            finally:
                closed.append(True)

        async def first() -> bytes:
            found = paging.pages_of(endless())
            try:
                return await anext(found)
            finally:
                await found.aclose()

        self.assertEqual(len(self.successResultOf(Deferred.fromCoroutine(first()))), paging.MAX_BYTES)
        self.assertEqual(closed, [True])
