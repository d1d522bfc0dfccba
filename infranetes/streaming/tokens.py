# SPDX-License-Identifier: Apache-2.0
"""Tokens in URLs: each stands for something that was asked for, can be used once, and soon expires."""

from __future__ import annotations

import secrets
from typing import Generic, TypeVar

import attrs
from twisted.internet.interfaces import IReactorTime

from infranetes_common.errors import ResourceExhausted

#: Seconds after which a token expires.
LIFETIME = 60.0
#: The most tokens that are neither used nor expired.
MAX_OUTSTANDING = 1000


RequestT = TypeVar("RequestT")


@attrs.frozen
class Ticket(Generic[RequestT]):
    """The request that a token stands for. `kind` is such as exec, attach or portforward."""

    kind: str
    request: RequestT
    expires: float


class Tokens(Generic[RequestT]):
    """The outstanding tokens, of 192 random bits each."""

    def __init__(self, clock: IReactorTime) -> None:
        self._clock = clock
        self._tickets: dict[str, Ticket[RequestT]] = {}  # in the order in which they expire

    def issue(self, kind: str, request: RequestT) -> str:
        """Return a new token.

        :raise ResourceExhausted: too many are outstanding.
        """
        self._expire()
        if len(self._tickets) >= MAX_OUTSTANDING:
            raise ResourceExhausted(
                f"{MAX_OUTSTANDING} URLs of streams wait to be fetched: fetch them, or wait a minute"
            )
        token = secrets.token_urlsafe(24)
        self._tickets[token] = Ticket(kind, request, self._clock.seconds() + LIFETIME)
        return token

    def redeem(self, kind: str, token: str) -> RequestT | None:
        """Return the request that `token` stands for; None if it is unknown, was used or has expired."""
        self._expire()
        ticket = self._tickets.pop(token, None)
        return ticket.request if ticket is not None and ticket.kind == kind else None

    def _expire(self) -> None:
        now = self._clock.seconds()
        for token, ticket in list(self._tickets.items()):
            if ticket.expires > now:
                break
            del self._tickets[token]
