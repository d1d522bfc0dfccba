# SPDX-License-Identifier: Apache-2.0
"""A bucket of tokens, each of which is a call that a cloud serves."""

from __future__ import annotations

import math

import attrs

_ROUNDING = 1e-6


@attrs.define
class TokenBucket:
    """A bucket that is full at first.

    :param refill: tokens per second.
    :param step: seconds after which tokens are added together; 0: they are added continuously.
    :param at: the time at which it is made."""

    most: float
    refill: float
    at: float
    step: float = 0.0
    tokens: float = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.tokens = self.most

    def has_one(self, now: float) -> bool:
        """Return whether a call would be served."""
        past = now - self.at
        if self.step:
            past = math.floor((past + _ROUNDING) / self.step) * self.step
        self.at += past
        self.tokens = min(self.most, self.tokens + past * self.refill)
        return self.tokens >= 1 - _ROUNDING

    def take(self) -> None:
        """Count a call that is served."""
        self.tokens -= 1

    def wait(self, now: float) -> float:
        """Return the seconds until there is a token."""
        if self.has_one(now):
            return 0.0
        missing = (1 - self.tokens) / self.refill
        return math.ceil(missing / self.step) * self.step - (now - self.at) if self.step else missing
