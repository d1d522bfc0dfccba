# SPDX-License-Identifier: Apache-2.0
"""Brings one VM's service proxy up to date, and keeps it so.

A VM says what it has when a call begins. What it lacks is sent, in parts, and the next changes once it has said
that these are in force: a VM that is slow is sent less often, and each rule only as it is then.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator
from itertools import islice
from typing import Protocol

from twisted.internet.defer import Deferred, DeferredQueue
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from infranetes.services.objects import Address
from infranetes.services.rules import Key, Rule, Without
from infranetes.services.table import Change
from infranetes_common.concurrency import Notifier, backoff, sleep, start
from infranetes_common.errors import InfranetesError
from infranetes_common.wire import vmserver

PART = 500  # rules in one message
ENDPOINTS_IN_PART = 5000
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 10.0  # seconds between two calls that fail

_PROTOCOLS = {"TCP": 6, "UDP": 17, "SCTP": 132}
_log = Logger()


class IRules(Protocol):
    """What is sent: `Table`, and its identity.

    :ivar id: by which a VM knows whether numbers are comparable. :ivar number: of the last change.
    """

    @property
    def id(self) -> str: ...

    @property
    def number(self) -> int: ...

    @property
    def changes(self) -> Iterable[Change]:
        """The rules that there are, as changes."""

    def since(self, number: int) -> Iterator[Change] | None:
        """See `Table.since`."""


class Agent(Protocol):
    """The agent's call."""

    def service_rules(
        self, updates: AsyncIterator[vmserver.ServiceRulesUpdate]
    ) -> AsyncGenerator[vmserver.ServiceRulesState, None]:
        """Send updates; yield what is in force."""
