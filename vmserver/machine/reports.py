# SPDX-License-Identifier: Apache-2.0
"""Reports of the processor on the machine, by the kernel's configfs-tsm (Linux 6.7 and later).

Source: the kernel's Documentation/ABI/testing/configfs-tsm-report. Each reader makes a directory of its own
there, writes what the report is to contain, and reads the report.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable
from pathlib import Path

import attrs

from infranetes_common.attestation import MOST_REPORT
from infranetes_common.errors import FailedPrecondition, Unavailable

DIRECTORY = Path("/sys/kernel/config/tsm/report")


@attrs.frozen
class Report:
    """A report.

    :ivar provider: the kernel's name of what made it, such as sev_guest.
    :ivar auxiliary: what the provider has besides, such as certificates."""

    provider: str
    report: bytes
    auxiliary: bytes = b""


@attrs.frozen
class Reports:
    """The kernel's reports.

    :param make: makes a directory there, which the kernel fills. :param remove: removes it."""

    _directory: Path = DIRECTORY
    _make: Callable[[Path], None] = os.mkdir
    _remove: Callable[[Path], None] = os.rmdir

    def _thd_of(self, bound: bytes) -> Report:
        """Return a report that contains these 64 bytes.

        :raise FailedPrecondition: the machine is not confidential, or its kernel makes no reports.
        :raise Unavailable: the processor made none this time."""
        entry = self._directory / f"infranetes-{secrets.token_hex(8)}"
        try:
            self._make(entry)
        except OSError as error:
            raise FailedPrecondition(
                f"this VM's kernel makes no reports of the processor ({error.strerror}): that takes a "
                "confidential VM, and Linux 6.7 or newer with the module sev-guest or tdx-guest loaded"
            ) from None
        try:
            (entry / "inblob").write_bytes(bound)
            report = _read(entry / "outblob")
            return Report(
                _read(entry / "provider").decode("ascii", "replace").strip(), report, _auxiliary(entry)
            )
        except OSError as error:
            raise Unavailable(f"the processor made no report on this VM: {error.strerror}") from None
        finally:
            self._remove(entry)


def _auxiliary(entry: Path) -> bytes:
    """Return what comes with a report; b"": nothing does."""
    try:
        return _read(entry / "auxblob")
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENXIO):
            return b""
        raise


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        content = file.read(MOST_REPORT + 1)
    if len(content) > MOST_REPORT:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    return content
