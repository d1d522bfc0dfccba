# SPDX-License-Identifier: Apache-2.0
"""What VMs write to their serial ports, as boot diagnostics has it: a blob in Azure's own storage.

Compute signs a link to the blob for two hours, which counts as a change of the VM, so it is kept for one.
The blob is made some minutes after the first output, grows to about 1 MiB, and has zeros behind the text.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import attrs

from infranetes.providers.cloud.azure.driver import Driver
from infranetes.providers.cloud.azure.errors import AzureError
from infranetes.providers.cloud.guests.tails import Tail

_LINK_SECONDS = 3600.0
_NO_BLOB, _REFUSED = 404, 403


@attrs.define
class _Log:
    link: str
    until: float  # by `now`: when the link is asked for anew
    tail: Tail

    def _thd_read(self, driver: Driver) -> bytes:
        return self.tail._thd_read(partial(driver.blob, self.link)) if self.link else b""


class SerialLogs:
    """The logs of one location's VMs. :param now: seconds. Methods may be called by any thread."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._all: dict[str, _Log] = {}  # by VMs' names

    def forget(self, name: str) -> None:
        """Forget a VM that ends."""
        self._all.pop(name, None)

    def _thd_read(self, driver: Driver, name: str) -> bytes:
        """Return what a VM wrote last, at least what is new; b"": nothing is shown yet."""
        log = self._all.get(name)
        if log is None or self._now() > log.until:
            log = self._thd_asked(driver, name)
        try:
            return log._thd_read(driver)
        except AzureError as error:
            if int(error.code) == _NO_BLOB:
                return b""
            if int(error.code) != _REFUSED:
                raise
        return self._thd_asked(driver, name)._thd_read(driver)  # the link was no longer valid

    def _thd_asked(self, driver: Driver, name: str) -> _Log:
        """Have a link signed."""
        link, before = driver.serial_log(name), self._all.get(name)
        tail = before.tail if before is not None else Tail()
        log = self._all[name] = _Log(link, self._now() + _LINK_SECONDS if link else 0.0, tail)
        return log
