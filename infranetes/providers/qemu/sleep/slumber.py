# SPDX-License-Identifier: Apache-2.0
"""What the daemon has of one VM that sleeps, or is falling asleep or waking."""

from __future__ import annotations

from collections.abc import Callable, Collection

import attrs

from infranetes.providers.qemu.program.open_files import OpenFiles
from infranetes.providers.qemu.sleep.doorbell import Doorbell
from infranetes.providers.qemu.sleep.record import SleepRecord, Stage
from infranetes_common.concurrency import run_in_thread
from infranetes_common.reactors import IReactor


@attrs.define(eq=False)
class Slumber:
    """See `vm.vm.Slumbers`. :ivar held: files that its next process inherits, and others may remove.
    :ivar release_volumes: has its volumes no more. Idempotent."""

    record: SleepRecord
    doorbell: Doorbell | None = None
    held: OpenFiles | None = None
    release_volumes: Callable[[], None] = lambda: None

    @property
    def asleep(self) -> bool:
        return self.record.stage is Stage.ASLEEP

    @property
    def serials(self) -> Collection[str]:
        return {each.serial for each in self.record.volumes}

    async def close(self, reactor: IReactor) -> None:
        """See `vm.vm.Slumbers`."""
        if self.doorbell is not None:
            self.doorbell.rest()
        await run_in_thread(reactor, self._thd_close)

    def _thd_close(self) -> None:
        doorbell, self.doorbell = self.doorbell, None
        if doorbell is not None:
            doorbell.thd_close()
        held, self.held = self.held, None
        if held is not None:
            held.close()
        self.release_volumes()
