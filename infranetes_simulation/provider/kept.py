# SPDX-License-Identifier: Apache-2.0
"""Kept simulated VMs. They have no memory to keep: a file says which VM it was, and another VM starts afresh.

state of a directory     its file                next
kept                     says which VM           `prepare`
prepared                 says so, too            VMs start from it
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from infranetes.providers.keeping import KeptVm
from infranetes_common.concurrency import replace_file, run_in_thread, sleep
from infranetes_common.errors import FailedPrecondition, Unavailable
from infranetes_common.reactors import IReactor

_FILE = "vm.json"
_PAUSE_SECONDS = 0.05


async def keep(reactor: IReactor, sandbox_id: str, directory: Path) -> KeptVm:
    """Keep the VM of a sandbox. :raise Unavailable: the file can't be written."""
    began, taken_at = reactor.seconds(), time.time()
    await sleep(reactor, _PAUSE_SECONDS)
    pause = reactor.seconds() - began
    size = await run_in_thread(reactor, _thd_write, directory, sandbox_id, False)
    machine = {"hypervisor": "simulated"}
    return KeptVm(taken_at, pause, reactor.seconds() - began, {_FILE: size}, machine)


def thd_prepare(directory: Path) -> None:
    """Make a kept VM what others start from. Idempotent. Blocks. :raise FailedPrecondition: it is none."""
    _thd_write(directory, _read(directory)[0], True)


def thd_check(directory: Path) -> str:
    """Return the id of the sandbox whose VM was kept. Blocks.

    :raise FailedPrecondition: no VM can start from it."""
    sandbox_id, prepared = _read(directory)
    if not prepared:
        raise FailedPrecondition(f"the kept VM in {directory} was not prepared; prepare it")
    return sandbox_id


def _thd_write(directory: Path, sandbox_id: str, prepared: bool) -> int:
    content = json.dumps({"sandbox_id": sandbox_id, "prepared": prepared})
    try:
        replace_file(directory / _FILE, content, durable=False)
        os.chmod(directory / _FILE, 0o600)
    except OSError as error:
        raise Unavailable(f"{directory / _FILE} can't be written: {error.strerror}") from None
    return len(content)


def _read(directory: Path) -> tuple[str, bool]:
    try:
        content = json.loads((directory / _FILE).read_bytes())
        return str(content["sandbox_id"]), bool(content["prepared"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FailedPrecondition(f"no kept VM is in {directory}: {error}") from None
