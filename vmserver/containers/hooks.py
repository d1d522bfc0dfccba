# SPDX-License-Identifier: Apache-2.0
"""What a container is told before it is kept, or in a clone once it goes on."""

from __future__ import annotations

import math

import attrs

from infranetes_common.errors import InvalidArgument
from infranetes_common.wire import vmserver as messages
from vmserver import validate

MAX_SECONDS = 600.0
MAX_SIGNAL = 64
OUTPUT_BYTES = 2048  # of a command that fails, for the error's message


@attrs.frozen
class Hook:
    """A command, which has to end with 0, or a signal for the container's first process.

    :ivar command: empty: it is a signal. :ivar seconds: what the command may take; after a signal, what is
        waited."""

    command: tuple[str, ...]
    signal: int
    seconds: float


def hook(field: str, said: messages.Hook) -> Hook:
    """Return the hook that a message describes. :raise InvalidArgument: it describes none."""
    if bool(said.command) == bool(said.signal):
        raise InvalidArgument(f"{field}: a hook is either a command or a signal")
    if said.command:
        validate.command(said.command)
    elif said.signal > MAX_SIGNAL:
        raise InvalidArgument(f"{field}.signal {said.signal}: expected 1 to {MAX_SIGNAL}")
    if not (math.isfinite(said.seconds) and 0 < said.seconds <= MAX_SECONDS):
        raise InvalidArgument(
            f"{field}.seconds {said.seconds}: expected more than 0 and at most {MAX_SECONDS:g}"
        )
    return Hook(tuple(said.command), said.signal, said.seconds)
