# SPDX-License-Identifier: Apache-2.0
"""What goes wrong between a provider and its cloud."""

from __future__ import annotations

import enum
import random
from collections.abc import Callable

import attrs

NORMAL, NEVER, NO_AGENT = "normal", "never", "no-agent"  # behaviours of launched VMs


class FaultKind(enum.Enum):
    """What happens to a call."""

    THROTTLE = "throttle"  # refused: too many calls
    ERROR = "error"  # 503, without effect
    ACTED = "acted"  # done, but the answer is an error 500
    LOST = "lost"  # done, but the connection breaks before the answer
    SILENT = "silent"  # done, but nothing is answered, and the connection stays open
    STALE = "stale"  # an old list
    STALE_VOLUMES = "stale volumes"  # an empty list of volumes
    QUOTA = "quota"
    FAMILY_QUOTA = "family quota"  # of sizes that the rule names
    CAPACITY = "capacity"
    FULL_SUBNET = "full subnet"
    REVOKED = "revoked"
    BUSY = "busy"  # refused: the VM is busy
    IGNORED = "ignored"  # answered as if it were done, and not done
    UNKNOWN = "unknown"  # refused: the VM is not known (yet)


UNANSWERED = (FaultKind.ACTED, FaultKind.LOST, FaultKind.SILENT)
"""The kinds of which nobody learns whether the call was done."""


class Silence(Exception):
    """The call gets no answer, and the connection stays open, so that the caller has to give up by itself."""


@attrs.define
class Fault:
    """A rule: the next `times` calls of `action` ("": of any) fail with `kind`.

    :param share: the share of these calls that fail: one of each 1/share successive calls, chosen at random,
        so that none fails again and again by mere chance.
    :param only: restricts the calls by their parameters.
    """

    kind: FaultKind
    action: str = ""
    times: int = 10**9
    share: float = 1.0
    retry_after: float = 0.0
    only: Callable[[dict[str, str]], bool] = lambda parameters: True
    happened: int = 0
    _of_window: int = 0  # how many of the current 1/share calls are still to come
    _until: int = -1  # how many calls come before the chosen one; less than 0: it has been made

    def chooses(self, chance: random.Random) -> bool:
        """Return whether the next call is one that fails."""
        if not self._of_window:
            self._of_window = round(1 / self.share)
            self._until = chance.randrange(self._of_window)
        self._of_window -= 1
        self._until -= 1
        return self._until == -1

    def withhold_answer(self) -> None:
        """Leave the call without an answer, if that is what happens to it.

        :raise ConnectionError: the connection breaks. :raise Silence: it does not."""
        if self.kind is FaultKind.LOST:
            raise ConnectionError
        if self.kind is FaultKind.SILENT:
            raise Silence


@attrs.define
class Faults:
    """The active rules."""

    rules: list[Fault] = attrs.field(factory=list)
    chance: random.Random = attrs.field(factory=lambda: random.Random(1))  # noqa: S311
    calls: dict[str, int] = attrs.field(factory=dict)

    def add(self, kind: FaultKind, action: str = "", **options: object) -> Fault:
        """Add a rule."""
        fault = Fault(kind, action, **options)  # type: ignore[arg-type]
        self.rules.append(fault)
        return fault

    def clear(self) -> None:
        """Remove all rules."""
        self.rules.clear()

    def befalling(self, parameters: dict[str, str]) -> Fault | None:
        """Return the rule that applies to this call."""
        action = parameters.get("Action", "")
        self.calls[action] = self.calls.get(action, 0) + 1
        for rule in self.rules:
            if rule.action not in ("", action) or rule.happened >= rule.times or not rule.only(parameters):
                continue
            if not rule.chooses(self.chance):
                continue
            rule.happened += 1
            return rule
        return None
