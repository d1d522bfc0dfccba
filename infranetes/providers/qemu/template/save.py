# SPDX-License-Identifier: Apache-2.0
"""The state of a VM whose memory is in a file already: its devices, and memory that was plugged in."""

from __future__ import annotations

import os
from pathlib import Path

from infranetes.providers.qemu.program.qmp import QmpConnection
from infranetes_common.concurrency import sleep
from infranetes_common.errors import Unavailable
from infranetes_common.reactors import IReactor

_SECONDS = 60.0


async def save_state(reactor: IReactor, qmp: QmpConnection, path: Path) -> None:
    """Make QEMU write the state of a VM that is stopped, without its memory, to a new file.

    :raise InfranetesError: QEMU does not."""
    capability = {"capability": "x-ignore-shared", "state": True}
    await qmp.execute("migrate-set-capabilities", capabilities=[capability])
    await qmp.execute("migrate-set-parameters", max_bandwidth=1 << 40)
    state = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        await qmp.pass_file("state", state)
    finally:
        os.close(state)
    await qmp.execute("migrate", uri="fd:state")
    deadline = reactor.seconds() + _SECONDS
    while True:
        answer = await qmp.execute("query-migrate")
        if answer.get("status") == "completed":
            return
        if answer.get("status") == "failed" or reactor.seconds() > deadline:
            raise Unavailable(f"its state can't be kept: {answer.get('error-desc', answer.get('status'))}")
        await sleep(reactor, 0.1)
