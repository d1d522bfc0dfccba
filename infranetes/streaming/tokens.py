"""The tickets with which a stream is fetched: each for one request, once, for a short time."""

from __future__ import annotations

import secrets
from typing import Any

import attrs

from infranetes_common.errors import ResourceExhausted

#: Seconds that a token may be used.
LIFETIME = 60.0
#: Tokens neither used nor expired.
MAX_OUTSTANDING = 1000


@attrs.frozen
class Ticket:
    """What a token stands for: `kind` is exec, attach or portforward, `request` the CRI's message."""

    kind: str
    request: Any
    expires: float


class Tokens:
    """The outstanding tokens. Guessing one is hopeless: 192 random bits."""

    def __init__(self, clock: Any) -> None:
        self._clock = clock
        self._tickets: dict[str, Ticket] = {}  # in the order in which they expire

    def issue(self, kind: str, request: Any) -> str:
        """A new token.

        :raise ResourceExhausted: too many are outstanding.
        """
        self._expire()
        if len(self._tickets) >= MAX_OUTSTANDING:
            raise ResourceExhausted(
                f"{MAX_OUTSTANDING} streams have been asked for and not fetched; fetch them or wait a minute"
            )
        token = secrets.token_urlsafe(24)
        self._tickets[token] = Ticket(kind, request, self._clock.seconds() + LIFETIME)
        return token

    def redeem(self, kind: str, token: str) -> Any | None:
        """The request that `token` stands for, the first time; None: unknown, used or late."""
        self._expire()
        ticket = self._tickets.pop(token, None)
        return ticket.request if ticket is not None and ticket.kind == kind else None

    def _expire(self) -> None:
        now = self._clock.seconds()
        for token, ticket in list(self._tickets.items()):
            if ticket.expires > now:
                break
            del self._tickets[token]
