# SPDX-License-Identifier: Apache-2.0
"""The record of a machine that is held: written before each step, gone with a reboot as all processes are.

state     what may be                                                  an agent that starts
(none)    the pod runs                                                 does nothing
HOLDING   some containers are held, volumes may be empty               lets all go: the call has failed
HELD      all are held, the network is silent                          holds them on
LEAVING   a clone: its containers are the kept pod's, and held; it     goes on leaving, and waits for an
          is silent, and has no identity                               identity
CLONE     a clone: it is another pod, which is given containers        does nothing: containers have records
"""

from __future__ import annotations

import enum
import json
from pathlib import Path

from infranetes_common.concurrency import replace_file
from infranetes_common.errors import FailedPrecondition

FILE = "held.json"


class State(enum.Enum):
    """See the table above."""

    NONE = "none"
    HOLDING = "holding"
    HELD = "held"
    LEAVING = "leaving"
    CLONE = "clone"


def thd_load(file: Path) -> State:
    """Read the state. Blocks. :raise FailedPrecondition: it can't be read."""
    try:
        return State(json.loads(file.read_bytes())["state"])
    except FileNotFoundError:
        return State.NONE
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FailedPrecondition(f"{file} is unreadable: {error}") from None


def thd_save(file: Path, state: State) -> None:
    """Write the state, or remove the record of none. Blocks. :raise FailedPrecondition: that fails."""
    try:
        if state is State.NONE:
            file.unlink(missing_ok=True)
            return
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(file, json.dumps({"state": state.value}), durable=False)
    except OSError as error:
        raise FailedPrecondition(f"{file} can't be written: {error.strerror}; see run_dir") from error
