# SPDX-License-Identifier: Apache-2.0
"""The number of the machine's processors in use: the others are offline until they are needed again."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from twisted.internet.defer import DeferredLock

from infranetes_common.commands import Command, run
from infranetes_common.errors import FailedPrecondition
from infranetes_common.reactors import IReactor

PROCESSORS = Path("/sys/devices/system/cpu")
_SCRIPT = 'state=$1; shift; for cpu; do echo "$state" >"$cpu/online" || exit 1; done'
SET_STATE = ("/bin/sh", "-c", _SCRIPT, "sh")
_NAME = re.compile(r"cpu([0-9]+)")


class MachineProcessors:
    """Calls are served one after the other.

    :param directory: the kernel's directory, which has one for each processor.
    :param set_state: a command that sets processors' state, 0 or 1, given that and their directories.
    """

    def __init__(
        self, reactor: IReactor, directory: Path = PROCESSORS, set_state: Sequence[str] = SET_STATE
    ) -> None:
        self._reactor = reactor
        self._directory = directory
        self._set_state = set_state
        self._lock = DeferredLock()

    async def use(self, count: int, seconds: float) -> None:
        """Use `count` processors, or as many as there are; the first is always used. Idempotent.

        :raise FailedPrecondition: the kernel refuses.
        :raise DeadlineExceeded: it takes longer than `seconds`.
        """
        async with self._lock:
            processors = self._processors()
            rest = [each for each in processors[max(count, 1) :] if _online(each)]
            begin = [each for each in processors[:count] if not _online(each)]
            # Switch processors off from the highest number down: the hypervisor plugged them in from the
            # lowest up.
            output = [await self._set("0", rest[::-1], seconds), await self._set("1", begin, seconds)]
            wrong = [each.name for each in (*rest, *begin) if _online(each) is (each in rest)]
            if wrong:
                raise FailedPrecondition(f"the kernel does not switch {wrong[0]}: {' '.join(output)[:200]}")

    async def _set(self, state: str, processors: Sequence[Path], seconds: float) -> str:
        if not processors:
            return ""
        return (
            await run(self._reactor, Command([*self._set_state, state, *map(str, processors)], seconds))
        ).message()

    def _processors(self) -> Sequence[Path]:
        """Return their directories, by number."""
        found = {
            int(name[1]): path for path in self._directory.iterdir() if (name := _NAME.fullmatch(path.name))
        }
        return [found[number] for number in sorted(found)]


def _online(processor: Path) -> bool:
    """Return whether a processor is online. A machine's first can't go offline and has no such file."""
    try:
        return (processor / "online").read_text().strip() == "1"
    except FileNotFoundError:
        return True
