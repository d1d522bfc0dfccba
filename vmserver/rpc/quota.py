# SPDX-License-Identifier: Apache-2.0
"""A limit on concurrent calls of one kind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from infranetes_common.errors import ResourceExhausted


class Quota:
    """Allows `limit` calls at a time; further ones are refused rather than queued.

    :param limit: may be changed at any time; calls in progress continue.
    :param what: completes the sentence "64 ... already".
    """

    def __init__(self, limit: int, what: str) -> None:
        self.limit = limit
        self._what = what
        self._used = 0

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Occupy one slot while the context is open. :raise ResourceExhausted: all are taken."""
        if self._used >= self.limit:
            raise ResourceExhausted(f"{self.limit} {self._what} already; try again later")
        self._used += 1
        try:
            yield
        finally:
            self._used -= 1
