# SPDX-License-Identifier: Apache-2.0
"""A console of which the cloud tells only what was written last: its bytes with numbers. No I/O.

Each answer is laid over the one before: what follows where they overlap is new. Where they don't, something
between was missed, or the cloud began anew: a byte's number is left out there, which readers see as a gap.
"""

from __future__ import annotations

ANSWER_BYTES = 128 << 10  # of an answer that are looked at, its last
KEPT_BYTES = 256 << 10
_ANCHOR = 64  # bytes of an answer's beginning, by which it is found in the one before
_MOST_PLACES = 64  # that are tried: a guest may write the same for ever


class KeptConsole:
    """What is kept of a console.

    :ivar begin: the number of the first byte. :ivar data: the bytes. :param last: how many of the data's last
        bytes the last answer was."""

    def __init__(self, begin: int = 0, data: bytes = b"", last: int = 0) -> None:
        self.begin = begin
        self.data = data
        self._last = data[len(data) - last :] if last else b""

    @property
    def end(self) -> int:
        """The number that the next byte will have."""
        return self.begin + len(self.data)

    def add(self, answer: bytes) -> bool:
        """Add what is new in an answer; return whether anything is."""
        answer = answer[-ANSWER_BYTES:]
        if not answer or answer in self._last:  # or an old answer
            return False
        new = following(self._last, answer)
        if new is None:
            self.begin, self.data, new = self.end + 1, b"", answer
        data = self.data + new
        dropped = max(len(data) - KEPT_BYTES, 0)
        self.begin += dropped
        self.data, self._last = data[dropped:], answer
        return True

    def content(self) -> bytes:
        """Return it as a file has it."""
        return f"{self.begin} {len(self._last)}\n".encode() + self.data

    @classmethod
    def of(cls, content: bytes) -> KeptConsole:
        """Return what a file has. :raise ValueError: it is none."""
        first, _, data = content.partition(b"\n")
        begin, last = map(int, first.split())
        if begin < 0 or not 0 <= last <= len(data):
            raise ValueError(first)
        return cls(begin, data, last)


def following(last: bytes, answer: bytes) -> bytes | None:
    """Return what an answer has after the one before; None: they don't overlap."""
    if answer.startswith(last):
        return answer[len(last) :]
    at = last.find(answer[:_ANCHOR])
    for _ in range(_MOST_PLACES):
        if at < 0:
            break
        if answer.startswith(last[at:]):
            return answer[len(last) - at :]
        at = last.find(answer[:_ANCHOR], at + 1)
    return None
