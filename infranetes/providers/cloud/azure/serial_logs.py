# SPDX-License-Identifier: Apache-2.0
"""What VMs write to their serial ports, as boot diagnostics has it: a blob in Azure's own storage.

Compute signs a link to the blob for two hours, which counts as a change of the VM, so it is kept for one.
The blob is made some minutes after the first output, grows to about 1 MiB, and has zeros behind the text.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import attrs

from infranetes.providers.cloud.azure.driver import Driver
from infranetes.providers.cloud.azure.errors import AzureError

_LINK_SECONDS = 3600.0
_AT_ONCE = 4 << 20  # bytes
_OVERLAP = 128 << 10  # bytes that were read before and are read again, by which what follows is recognized
_NO_BLOB, _REFUSED, _SHORTER = 404, 403, 416


@attrs.define
class _Log:
    link: str
    until: float  # by `now`: when the link is asked for anew
    length: int = 0  # bytes of the text, as far as it was read


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
            log = self._thd_asked(driver, name, log.length if log is not None else 0)
        try:
            return _thd_content(driver, log) if log.link else b""
        except AzureError as error:
            if int(error.code) == _NO_BLOB:
                return b""
            if int(error.code) not in (_REFUSED, _SHORTER):
                raise
        log = self._thd_asked(driver, name, 0)  # the link is no longer valid, or the log began anew
        return _thd_content(driver, log) if log.link else b""

    def _thd_asked(self, driver: Driver, name: str, length: int) -> _Log:
        link = driver.serial_log(name)
        log = _Log(link, self._now() + _LINK_SECONDS if link else 0.0, length)
        self._all[name] = log
        return log


def _thd_content(driver: Driver, log: _Log) -> bytes:
    begin = max(log.length - _OVERLAP, 0)
    content = driver.blob(log.link, begin, _AT_ONCE).rstrip(b"\0")
    log.length = begin + len(content)
    return content
