# SPDX-License-Identifier: Apache-2.0
"""The start of the engine in a VM where it does not run until a pod needs it."""

from __future__ import annotations

import os
from collections.abc import Sequence

from infranetes_common.errors import Unavailable
from infranetes_common.reactors import IReactor
from vmserver.containers.programs import run


async def start_engine(reactor: IReactor, command: Sequence[str], seconds: float) -> None:
    """Run a command that starts Docker, such as `systemctl start docker`, and wait for its end.

    Does nothing if Docker runs already. If this is cancelled, systemd still finishes the start.

    :raise Unavailable: it failed, or did not end within `seconds`; the message has its output."""
    words = " ".join(command)
    if not os.access(command[0], os.X_OK):
        raise Unavailable(
            f"Docker can't be started: {command[0]} is not a program in this VM; see start_command"
        )
    try:
        ended = await run(reactor, command, seconds)
    except Unavailable as error:
        raise Unavailable(f"Docker was not started by `{words}`: {error}") from None
    if ended.code:
        raise Unavailable(
            f"Docker was not started: `{words}` ended with {ended.code}: {' '.join(ended.output.split())}; "
            "the VM's console has more (infranetes-ctl console)"
        )
