# SPDX-License-Identifier: Apache-2.0
"""How pods want to be kept, and what their containers are told of it."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping

import attrs

from infranetes.machines.keeping import Hook
from infranetes.providers.annotations import AFTER_CLONE, BEFORE_KEEP, hooks_of, keeps_secrets

SIGNAL_SECONDS = 2.0  # that a container has after a signal


@attrs.frozen
class KeepWishes:
    """How a pod wants to be kept. :ivar hooks: by the containers' ids.
    :ivar secrets: what its volumes in memory have is kept, too."""

    hooks: Mapping[str, Hook] = attrs.field(factory=dict)
    secrets: bool = False


def keep_wishes(annotations: Mapping[str, str], containers: Iterable[tuple[str, str]]) -> KeepWishes:
    """Read how a pod wants to be kept. :param containers: names and ids.

    :raise InvalidArgument: an annotation is malformed."""
    hooks_by_name = hooks_of(annotations, BEFORE_KEEP)
    hooks = {id: hook for name, id in containers if (hook := _hook(hooks_by_name, name)) is not None}
    return KeepWishes(hooks, keeps_secrets(annotations))


def clone_hook(annotations: Mapping[str, str], container: str) -> Hook | None:
    """Return what a container is told once it goes on in a clone; None: nothing."""
    return _hook(hooks_of(annotations, AFTER_CLONE), container)


def _hook(hooks_by_name: Mapping[str, tuple[str, ...]], container: str) -> Hook | None:
    """Return a container's hook. :param hooks_by_name: by names; "": of all that are not named."""
    words = hooks_by_name.get(container) or hooks_by_name.get("")
    if not words:
        return None
    if len(words) == 1 and words[0] in signal.Signals.__members__:
        return Hook(signal=signal.Signals[words[0]], seconds=SIGNAL_SECONDS)
    return Hook(command=words)
