# SPDX-License-Identifier: Apache-2.0
"""The disks on this VM's virtio-scsi host. Every method blocks: call it in a thread."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from pathlib import Path

from vmserver.machine.mounts import mounts

_DRIVER = "virtio_scsi"
_QEMU = "QEMU"  # the vendor of QEMU's disks, since clouds have virtio-scsi disks too
_SERIAL_CHARACTERS = 36  # of a diff id's hex digits: QEMU truncates longer serial numbers
_SERIAL_PAGE, _SERIAL_BEGIN = "vpd_pg80", 4  # unit serial number (SPC-4, 7.8.15), after the header


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

    def appeared(self, target: int, lun: int, diff_id: str) -> str | None:
        """Return the path of this layer's disk; None: it is not there yet.

        The kernel is made to scan this one place: it is not notified of disks that come and go. If it still
        knows another layer's disk there, it forgets that first, unless it is mounted."""
        host = self.host()
        if host is None:
            return None
        disk = self._sys / f"bus/scsi/devices/{host}:0:{target}:{lun}"
        wanted = diff_id.removeprefix("sha256:")[:_SERIAL_CHARACTERS]
        serial = _serial(disk)
        if serial != wanted:
            if serial is not None and not self._mounted(disk):
                _write(disk / "delete", "1")
            _write(self._sys / f"class/scsi_host/host{host}/scan", f"0 {target} {lun}")
            if _serial(disk) != wanted:
                return None
        return self._device(disk)

    def with_serial(self, target: int, serial: str, used: Collection[str] = ()) -> str | None:
        """Return the path of the disk with this serial number at a target; None: it is not there yet.

        If it is not found otherwise, unmounted disks of that target are removed from the kernel: the
        hypervisor may have put it in the place of a disk that was detached.

        :param used: serial numbers of disks that are not forgotten, though they are not mounted."""
        host = self.host()
        if host is None:
            return None
        for known in self._at(host, target):
            if _serial(known) == serial:
                return self._device(known)
        for look in range(2):
            if look:
                for known in self._at(host, target):
                    if _is_qemus(known) and _serial(known) not in used and not self._mounted(known):
                        _write(known / "delete", "1")
            _write(self._sys / f"class/scsi_host/host{host}/scan", f"0 {target} -")
            for known in self._at(host, target):
                if _serial(known) == serial:
                    return self._device(known)
        return None

    def forget_unmounted(self, target: int, serial: str) -> None:
        """Remove QEMU's disk with this serial number from the kernel, unless it is mounted."""
        host = self.host()
        for known in self._at(host, target) if host is not None else ():
            if _serial(known) == serial and _is_qemus(known) and not self._mounted(known):
                _write(known / "delete", "1")

    def _at(self, host: int, target: int) -> list[Path]:
        return sorted((self._sys / "bus/scsi/devices").glob(f"{host}:0:{target}:*"))

    def look_at_size(self, number: int) -> None:
        """Make the kernel read a disk's size again; it may have grown. :param number: its `st_rdev`."""
        self._write_to(number, "device/rescan")

    def _device(self, disk: Path) -> str | None:
        """Return the path of a SCSI disk's block device; None: it has none yet."""
        with contextlib.suppress(OSError):
            for name in sorted(os.listdir(disk / "block")):
                if (self._dev / name).exists():
                    return str(self._dev / name)
        return None

    def _mounted(self, disk: Path) -> bool:
        """Return whether something is mounted from a SCSI disk."""
        numbers = set()
        with contextlib.suppress(OSError):
            numbers = {
                (disk / "block" / name / "dev").read_text().strip() for name in os.listdir(disk / "block")
            }
        return bool(numbers) and any(one.device in numbers for one in mounts())

    def attached(self, number: int) -> bool:
        """Return whether a block device still exists. :param number: its `st_dev`."""
        return self._block(number).exists()

    def forget(self, number: int) -> None:
        """Remove a disk that is no longer mounted from the kernel, so that it can be detached.

        Does nothing for other block devices, whose removal the kernel learns of by itself."""
        if _is_qemus(self._block(number) / "device"):
            self._write_to(number, "device/delete")

    def _write_to(self, number: int, attribute: str) -> None:
        """Write to an attribute of a block device, by `st_rdev`, if it exists."""
        _write(self._block(number) / attribute, "1")

    def _block(self, number: int) -> Path:
        return self._sys / f"dev/block/{os.major(number)}:{os.minor(number)}"


def _write(attribute: Path, text: str) -> None:
    """Write to a file of sysfs, if it is there and can be written."""
    with contextlib.suppress(OSError):
        descriptor = os.open(attribute, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)


def _is_qemus(disk: Path) -> bool:
    """Return whether a SCSI disk is QEMU's: the kernel is not told when these are plugged or unplugged."""
    try:
        return (disk / "vendor").read_text().strip() == _QEMU
    except OSError:
        return False


def _serial(disk: Path) -> str | None:
    """Return a SCSI disk's serial number; None: there is no disk."""
    try:
        return (disk / _SERIAL_PAGE).read_bytes()[_SERIAL_BEGIN:].decode("latin-1").strip()
    except OSError:
        return None
