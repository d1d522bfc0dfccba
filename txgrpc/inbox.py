# SPDX-License-Identifier: Apache-2.0
"""A stream's received messages, and how much more the other side may send."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from txgrpc.framing import PREFIX_SIZE, MessageReader
from txgrpc.limits import Budget


class Inbox:
    """Keeps messages until the application takes them, and only then returns the window to the sender.

    So the sender may be one window ahead. The exception is a message larger than the window: while the
    application waits for it (`awaited`), its bytes are credited as they arrive, once the connection's budget
    has room for all of it.
    """

    __slots__ = (
        "_arrived",
        "_budget",
        "_credit_at",
        "_messages",
        "_queued",
        "_reader",
        "_reserved",
        "_waiting",
        "_window",
        "awaited",
    )

    def __init__(self, limit: int, window: int, budget: Budget) -> None:
        self._reader = MessageReader(limit)
        self._messages: deque[bytes] | None = None  # only while there are any: calls that wait are many
        self._window = window
        self._credit_at = window // 2  # half a window, for fewer and larger WINDOW_UPDATEs
        self._budget = budget
        self._queued = 0  # bytes of complete messages that were not taken
        self._arrived = 0  # bytes that arrived and were not credited
        self._reserved = 0
        self._waiting: Callable[[], None] | None = None  # this inbox's callback in the budget's queue
        self.awaited = False

    def __len__(self) -> int:
        return len(self._messages) if self._messages is not None else 0

    @property
    def partial(self) -> bool:
        """True if a message has begun to arrive and is not yet complete."""
        return self._reader.partial > 0

    def receive(self, data: bytes, flow_length: int) -> None:
        """Take in data, which cost the sender `flow_length` bytes of window.

        :raise FramingError: see :meth:`MessageReader.feed`.
        """
        self._arrived += flow_length
        for message in self._reader.feed(data):
            if self._messages is None:
                self._messages = deque()
            self._messages.append(message)
            self._queued += len(message) + PREFIX_SIZE

    def take(self) -> bytes | None:
        """Return the next message, None if no complete one is here."""
        messages = self._messages
        if messages is None:
            return None
        message = messages.popleft()
        if not messages:
            self._messages = None
        self._queued -= len(message) + PREFIX_SIZE
        self._release()
        return message

    def credit(self, resumed: Callable[[], None]) -> int:
        """Return the bytes of window to give back to the sender now; 0 while they are not worth a frame.

        `resumed` is called when there is more to give because the budget has room again.
        """
        due = self._arrived - self._queued
        partial = self._reader.partial
        if partial and not self._may_assemble(resumed):
            due -= partial
        if due <= 0:
            return 0
        if due < self._credit_at and self._window - self._arrived >= self._reader.expected - partial:
            return 0  # the message in flight still fits
        self._arrived -= due
        return due

    def widen(self, window: int) -> int:
        """Let the sender be further ahead; return the bytes of window to give it for that."""
        more = max(0, window - self._window)
        self._window += more
        self._credit_at = self._window // 2
        return more

    def discard(self) -> None:
        """Drop all messages: nobody will take them."""
        self._messages = None
        self._queued = 0
        self.stop()

    def stop(self) -> None:
        """Stop reserving room, as nothing more will arrive. Received messages can still be taken."""
        self.awaited = False
        if self._waiting is not None:
            self._budget.withdraw(self._waiting)
            self._waiting = None
        self._release()

    def _may_assemble(self, resumed: Callable[[], None]) -> bool:
        size = self._reader.expected
        if size <= self._window or not self.awaited:
            return False
        if not self._reserved and self._waiting is None:

            def granted() -> None:
                waited, self._waiting = self._waiting, None
                self._reserved = size
                if waited is not None:
                    resumed()

            if not self._budget.reserve(size, granted):
                self._waiting = granted
        return self._reserved > 0

    def _release(self) -> None:
        if self._reserved:
            size, self._reserved = self._reserved, 0
            self._budget.release(size)
