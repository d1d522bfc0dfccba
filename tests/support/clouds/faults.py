"""What goes wrong between a provider and its cloud."""

from __future__ import annotations

import enum
import random
from collections.abc import Callable

import attrs

NORMAL, NEVER, NO_AGENT = "normal", "never", "no-agent"  # how machines behave once they are launched


class Kind(enum.Enum):
    """What happens to a call."""

    THROTTLE = "throttle"  # refused: too many
    ERROR = "error"  # 503, and the cloud did nothing
    ACTED = "acted"  # the cloud acts, and the answer is an error 500
    LOST = "lost"  # the cloud acts, and the connection breaks before the answer
    STALE = "stale"  # a list from before
    QUOTA = "quota"
    CAPACITY = "capacity"
    REVOKED = "revoked"
    BUSY = "busy"  # refused: something else is being done to the VM
    UNKNOWN = "unknown"  # the instance is not known (yet)


@attrs.define
class Fault:
    """One rule: `kind` befalls calls of `action` (of all, when empty) while `times` lasts.

    :param share: of the calls that it befalls. :param only: which calls, by their parameters.
    """

    kind: Kind
    action: str = ""
    times: int = 10**9
    share: float = 1.0
    retry_after: float = 0.0
    only: Callable[[dict[str, str]], bool] = lambda parameters: True
    happened: int = 0


@attrs.define
class Faults:
    """The rules in force."""

    rules: list[Fault] = attrs.field(factory=list)
    chance: random.Random = attrs.field(factory=lambda: random.Random(1))  # noqa: S311
    calls: dict[str, int] = attrs.field(factory=dict)

    def add(self, kind: Kind, action: str = "", **options: object) -> Fault:
        """Put a rule in force."""
        fault = Fault(kind, action, **options)  # type: ignore[arg-type]
        self.rules.append(fault)
        return fault

    def clear(self) -> None:
        """From now on all goes well."""
        self.rules.clear()

    def befalling(self, parameters: dict[str, str]) -> Fault | None:
        """What happens to this call."""
        action = parameters.get("Action", "")
        self.calls[action] = self.calls.get(action, 0) + 1
        for rule in self.rules:
            if rule.action not in ("", action) or rule.happened >= rule.times or not rule.only(parameters):
                continue
            if rule.share < 1 and self.chance.random() >= rule.share:
                continue
            rule.happened += 1
            return rule
        return None
