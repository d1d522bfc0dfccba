# SPDX-License-Identifier: Apache-2.0
"""The disks on this VM's virtio-scsi host. Every method blocks: call it in a thread."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_DRIVER = "virtio_scsi"
_SERIAL_CHARACTERS = 36  # of a diff id's hex digits: QEMU cuts longer ones
_SERIAL_PAGE, _SERIAL_BEGIN = "vpd_pg80", 4  # SCSI's unit serial number (SPC-4, 7.8.15), behind its header


class ScsiDisks:
    """The disks that the hypervisor shows.

    :param sys: where sysfs is mounted. :param dev: where the devices are.
    """

    def __init__(self, sys: Path = Path("/sys"), dev: Path = Path("/dev")) -> None:
        self._sys = sys
        self._dev = dev

    def host(self) -> int | None:
        """Return the number of the virtio-scsi host, the first one; None: there is none."""
        hosts = self._sys / "class/scsi_host"
        found = []
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(hosts):
                with contextlib.suppress(OSError):
                    if (hosts / name / "proc_name").read_text().strip() == _DRIVER:
                        found.append(int(name.removeprefix("host")))
        return min(found, default=None)

    def device(self, target: int, lun: int, diff_id: str) -> str | None:
        """Return the path of this layer's disk; None: it is not there, or another one is.

        The disk that had the place before may still be there, if the kernel was not told of its end yet."""
        host = self.host()
        if host is None:
            return None
        device = self._sys / f"bus/scsi/devices/{host}:0:{target}:{lun}"
        with contextlib.suppress(OSError):
            serial = (device / _SERIAL_PAGE).read_bytes()[_SERIAL_BEGIN:].decode("latin-1").strip()
            if serial != diff_id.removeprefix("sha256:")[:_SERIAL_CHARACTERS]:
                return None
            for name in sorted(os.listdir(device / "block")):
                if (self._dev / name).exists():
                    return str(self._dev / name)
        return None

    def scan(self, target: int, lun: int) -> None:
        """Have the kernel look whether a disk is there, which it does by itself as a rule."""
        host = self.host()
        if host is not None:
            with contextlib.suppress(OSError):
                (self._sys / f"class/scsi_host/host{host}/scan").write_text(f"0 {target} {lun}")

    def attached(self, number: int) -> bool:
        """Whether a block device, by `st_dev`, is there still."""
        return self._block(number).exists()

    def forget(self, number: int) -> None:
        """Have the kernel forget a disk that is not mounted any more, so that it can be taken away.

        Does nothing with any other block device."""
        delete = self._block(number) / "device/delete"
        with contextlib.suppress(OSError):
            if delete.exists():
                delete.write_text("1")

    def _block(self, number: int) -> Path:
        return self._sys / f"dev/block/{os.major(number)}:{os.minor(number)}"
