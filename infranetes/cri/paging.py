# SPDX-License-Identifier: Apache-2.0
"""Lists in pages: the messages of a streaming list."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing

MAX_ITEMS = 200
MAX_BYTES = 256 * 1024  # the most bytes of one message, unless a single item is larger


class _Page:
    """A message under construction, made of items from `translate.framed`."""

    def __init__(self) -> None:
        self._items: list[bytes] = []
        self._size = 0

    def add(self, item: bytes) -> bytes:
        """Add an item. Return the message that it no longer fitted into, or b"" if it did fit."""
        full = b""
        if self._items and (len(self._items) >= MAX_ITEMS or self._size + len(item) > MAX_BYTES):
            full = self.close()
        self._items.append(item)
        self._size += len(item)
        return full

    def close(self) -> bytes:
        """Return the message so far, b"" if it is empty, and begin the next one."""
        items, self._items, self._size = self._items, [], 0
        return b"".join(items)


def pages(items: Iterable[bytes]) -> Iterator[bytes]:
    """Yield messages within `MAX_ITEMS` and `MAX_BYTES`; none for an empty list."""
    page = _Page()
    for item in items:
        if full := page.add(item):
            yield full
    if rest := page.close():
        yield rest


async def pages_of(items: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """Do as `pages` for an async generator, which is closed along with this one."""
    page = _Page()
    async with aclosing(items):
        async for item in items:
            if full := page.add(item):
                yield full
    if rest := page.close():
        yield rest
