# SPDX-License-Identifier: Apache-2.0
"""Assertions about calls that fail, for tests of every kind."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TYPE_CHECKING

from twisted.trial.unittest import TestCase

if TYPE_CHECKING:
    _Base = TestCase
else:
    _Base = object


class FailureAssertions(_Base):
    """A mix-in for test cases."""

    async def fails(self, error: type[Exception], waiting: Awaitable[object]) -> str:
        """Assert that `waiting` fails with this error and a message longer than ten characters. Return the
        message."""
        with self.assertRaises(error) as caught:
            await waiting
        words = str(caught.exception)
        self.assertGreater(len(words), 10, f"{error.__name__} says too little: {words}")
        return words
