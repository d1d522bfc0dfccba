"""Addresses and disks of ours that no VM uses any more: they cost money too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twisted.internet.defer import CancelledError
from twisted.internet.task import deferLater
from twisted.logger import Logger

from infranetes.providers.cloud.calls import Calls
from infranetes.providers.cloud.interface import CloudError, ICloud, Leftover
from infranetes.providers.cloud.settings import CloudSettings
from infranetes.providers.cloud.translate import failed
from infranetes.providers.cloud.view import View

_log = Logger()


class Sweeper:
    """Releases what was nobody's in two passes that follow each other.

    :param busy: tokens that something is under way for: what is theirs is left alone.
    """

    def __init__(
        self,
        reactor: Any,
        cloud: ICloud,
        settings: CloudSettings,
        calls: Calls,
        view: View,
        busy: Callable[[], list[str]],
    ) -> None:
        self._reactor = reactor
        self._cloud = cloud
        self._settings = settings
        self._calls = calls
        self._view = view
        self._busy = busy
        self._strange: set[Leftover] = set()
        self._stopped = False

    async def run(self) -> None:
        """Sweep, until stopped."""
        while not self._stopped:
            await deferLater(self._reactor, self._settings.sweep_seconds)
            try:
                await self.once()
            except CloudError as error:
                _log.warn("{error}", error=failed(self._cloud.place, error))
            except CancelledError:
                raise
            except Exception:
                _log.failure("{cloud}: sweeping failed", cloud=self._cloud.place)

    def stop(self) -> None:
        """Sweep no more."""
        self._stopped = True

    async def once(self) -> None:
        """One pass."""
        found = await self._calls.call("look for addresses and disks", self._cloud._thd_leftovers)
        live = {known.found.token for known in self._view.live()} | set(self._busy())
        strange = {one for one in found if one.token not in live}
        again, self._strange = strange & self._strange, strange
        for one in again:
            await self._release(one)

    async def _release(self, leftover: Leftover) -> None:
        _log.warn(
            "{cloud}: {kind} {id} is ours and no VM's: it is released",
            cloud=self._cloud.place,
            kind=leftover.kind,
            id=leftover.id,
        )
        await self._calls.call(
            f"release {leftover.kind} {leftover.id}",
            lambda driver: self._cloud._thd_release(driver, leftover),
        )
