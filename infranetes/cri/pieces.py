"""Lists in pieces: what a streaming list sends, message by message."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing

MAX_ITEMS = 200
MAX_BYTES = 256 * 1024  # of one message, unless a single item is larger


class Piece:
    """One message that is being put together of items that are `translate.framed`."""

    def __init__(self) -> None:
        self._items: list[bytes] = []
        self._size = 0

    def add(self, item: bytes) -> bytes:
        """Take it in; the message that was complete before it, b"": it goes on."""
        full = b""
        if self._items and (len(self._items) >= MAX_ITEMS or self._size + len(item) > MAX_BYTES):
            full = self.rest()
        self._items.append(item)
        self._size += len(item)
        return full

    def rest(self) -> bytes:
        """What there is; b"": nothing."""
        items, self._items, self._size = self._items, [], 0
        return b"".join(items)


def pieces(items: Iterable[bytes]) -> Iterator[bytes]:
    """Messages of at most so many items and bytes. Nothing at all of an empty list."""
    piece = Piece()
    for item in items:
        if full := piece.add(item):
            yield full
    if rest := piece.rest():
        yield rest


async def pieces_of(items: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """As `pieces`. Closed, it closes `items`."""
    piece = Piece()
    async with aclosing(items):
        async for item in items:
            if full := piece.add(item):
                yield full
    if rest := piece.rest():
        yield rest
