# SPDX-License-Identifier: Apache-2.0
"""The states of a call's two halves.

A call on an HTTP/2 stream has a sending half and a receiving half, on the client as on the server, and
both go through the same states. HEADERS are the request's or the response's headers, MESSAGE is a
gRPC message, END is the half-close (END_STREAM; on the server's half: the trailers), RESET ends both
halves from either side or by the loss of the connection.

======  ========  =======  ======  ======
state   HEADERS   MESSAGE  END     RESET
======  ========  =======  ======  ======
IDLE    OPEN      --       ENDED   RESET     (END in IDLE: a trailers-only response)
OPEN    --        OPEN     ENDED   RESET
ENDED   --        --       --      ENDED
RESET   --        --       --      RESET
======  ========  =======  ======  ======
"""

from __future__ import annotations

import enum


class State(enum.IntEnum):
    """The state of one half of a call."""

    IDLE = 0
    OPEN = 1
    ENDED = 2
    RESET = 3


class Step(enum.IntEnum):
    """An event in one half of a call."""

    HEADERS = 0
    MESSAGE = 1
    END = 2
    RESET = 3


class WrongStep(Exception):
    """The half is not in a state that allows this."""


#: Indexed by state, then by step; None: the step is not allowed.
TRANSITIONS: tuple[tuple[State | None, ...], ...] = (
    (State.OPEN, None, State.ENDED, State.RESET),
    (None, State.OPEN, State.ENDED, State.RESET),
    (None, None, None, State.ENDED),
    (None, None, None, State.RESET),
)


def advance(state: State, step: Step) -> State:
    """Return the state after `step`.

    :raise WrongStep: the table has no such transition.
    """
    after = TRANSITIONS[state][step]
    if after is None:
        raise WrongStep(f"{step.name} in state {state.name}")
    return after
