# SPDX-License-Identifier: Apache-2.0
"""Settings of the kernel: files below /proc/sys.

They are written in a thread, since a write to a setting of the network may have to wait for the kernel's lock
of network devices (RTNL), which is held for long where network namespaces end.
"""

from __future__ import annotations

from pathlib import Path

from twisted.logger import Logger

from infranetes_common.concurrency import run_in_thread
from infranetes_common.errors import FailedPrecondition
from infranetes_common.reactors import IReactor

_log = Logger()


async def set_sysctl(reactor: IReactor, path: Path, value: str) -> None:
    """Set a setting, unless it has this value. Idempotent.

    :raise FailedPrecondition: it can't be set."""
    try:
        changed = await run_in_thread(reactor, _set, path, value)
    except OSError as error:
        raise FailedPrecondition(f"{path} can't be set to {value}: {error.strerror}; run as root") from error
    if changed:
        _log.info("set {path} to {value}", path=str(path), value=value)


async def raise_sysctl(reactor: IReactor, path: Path, least: int) -> None:
    """Set a number, unless it is that large already. If it can't be set, only the log says so. Idempotent."""
    try:
        if int(await run_in_thread(reactor, path.read_text)) < least:
            await set_sysctl(reactor, path, str(least))
    except (OSError, ValueError, FailedPrecondition) as error:
        _log.warn("{path} should be {least} at least: {error}", path=str(path), least=least, error=str(error))


def _set(path: Path, value: str) -> bool:
    """Return whether the value was another one. Blocks."""
    if path.read_text().strip() == value:
        return False
    path.write_text(value)
    return True
