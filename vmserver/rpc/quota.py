# SPDX-License-Identifier: Apache-2.0
"""A bound on how many calls of one kind are served at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from infranetes_common.errors import ResourceExhausted


class Quota:
    """At most `limit` at a time; one more is refused rather than queued.

    :param limit: may be changed at any time; what is under way goes on.
    :param what: completes the sentence "64 ... already".
    """

    def __init__(self, limit: int, what: str) -> None:
        self.limit = limit
        self._what = what
        self._used = 0

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Hold one of them. :raise ResourceExhausted: all are taken."""
        if self._used >= self.limit:
            raise ResourceExhausted(f"{self.limit} {self._what} already; try again later")
        self._used += 1
        try:
            yield
        finally:
            self._used -= 1
