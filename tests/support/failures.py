# SPDX-License-Identifier: Apache-2.0
"""What tests of every kind assert of calls that fail."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TYPE_CHECKING

from twisted.trial.unittest import TestCase

if TYPE_CHECKING:
    _Base = TestCase
else:
    _Base = object


class FailureAssertions(_Base):
    """Mixed into a test case."""

    async def fails(self, error: type[Exception], waiting: Awaitable[object]) -> str:
        """Assert that `waiting` fails with this error, and that its message says something. Return the
        message."""
        with self.assertRaises(error) as caught:
            await waiting
        words = str(caught.exception)
        self.assertGreater(len(words), 10, f"{error.__name__} says too little: {words}")
        return words
