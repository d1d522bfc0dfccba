# SPDX-License-Identifier: Apache-2.0
"""The state of a kept VM on disk, from which others start: like a template, and over one.

file              what it is                                          written by
hardware.json     what the VM had                                     `keep`
memory            the VM's memory and devices in QEMU's stream        `keep`, until it is prepared
disk.qcow2        the VM's layer over the template's disk             `keep`
ram, state        its memory, and its devices without it              `prepare`
overlay.qcow2     an empty layer, of which each VM gets a copy        `prepare`
layer-NAME        the file of a disk that it was shown, a link        `prepare`
manifest.json     what each of the others is                          `prepare`, last

The disks' names depend on their content; their files are the node's, which others link and unlink, and so are
told by inode and the time of their last change. The others' time is that of any change, as in a template.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import attrs

from infranetes.providers.interface import ShownDisk
from infranetes.providers.qemu.keep.hardware import Disk, Hardware, decode
from infranetes.providers.qemu.program.command_line import Fd
from infranetes.providers.qemu.program.open_files import OpenFiles
from infranetes.providers.qemu.template.template import DISK, OVERLAY, RAM, STATE, Template
from infranetes.providers.qemu.vm.sizes import Hotplug
from infranetes_common.concurrency import replace_file
from infranetes_common.errors import FailedPrecondition

MEMORY, HARDWARE, MANIFEST = "memory", "hardware.json", "manifest.json"
_OWN = (HARDWARE, DISK, RAM, STATE, OVERLAY)
_LARGEST = 1 << 20  # of JSON that is read


@attrs.frozen
class KeptState:
    """A kept VM's state in its directory, which others start from. :ivar template: that of the VM."""

    directory: Path
    template: Template
    hardware: Hardware

    @property
    def ram(self) -> Path:
        """The file of its memory; clones get it through `ram.SharedRam`."""
        return self.directory / RAM

    @property
    def overlay(self) -> Path:
        """An empty disk over its own, of which each VM gets a copy."""
        return self.directory / OVERLAY

    @property
    def disk(self) -> int:
        """The size of its disk in bytes."""
        return self.hardware.disk

    @property
    def more(self) -> Hotplug:
        """What it has beyond the template's hardware."""
        return self.hardware.more

    @property
    def disks(self) -> list[tuple[ShownDisk, Path]]:
        """The disks that VMs are shown from the beginning, and their files."""
        return [
            (ShownDisk(disk.name, disk.target, disk.lun), layer_file(self.directory, disk))
            for disk in self.hardware.disks
        ]

    def clone_arguments(self) -> list[str]:
        """Arguments for a clone."""
        return self.template.command_line.clone_arguments(kept=True)

    def open_for_clone(self, files: OpenFiles) -> None:
        """Open the files that a clone starts from, except the memory. :raise OSError: one is missing."""
        files.open(Fd.STATE, self.directory / STATE)
        files.open(Fd.KEPT_DISK, self.directory / DISK)
        self.template.open_disks(files)


def layer_file(directory: Path, disk: Disk) -> Path:
    """Return the file of a disk that the VM was shown."""
    return directory / f"layer-{disk.name}"


def thd_kept(directory: Path) -> Hardware:
    """Return what the VM had that was kept in a directory. Blocks.

    :raise FailedPrecondition: none was, or its files can't be read."""
    try:
        return decode(_content(directory / HARDWARE))
    except (OSError, ValueError) as error:
        raise FailedPrecondition(f"no VM was kept in {directory}: {error}") from None


def check_fits(directory: Path, hardware: Hardware, template: Template) -> None:
    """Check that a VM of this hardware was a clone of the template.

    :raise FailedPrecondition: it was not."""
    made_at = _made_at(template)
    if not hardware.template_made_at:
        raise FailedPrecondition(
            f"the VM in {directory} was made by an earlier release, which did not note of which template: "
            "recreate the pod, and keep that"
        )
    if (hardware.template, hardware.template_made_at) != (template.directory.name, made_at):
        raise FailedPrecondition(
            f"the VM in {directory} was kept with QEMU {hardware.version}, guest image {hardware.image} and "
            f"another template than VMs start from now, with {template.command_line.version} and guest image "
            f"{template.image.key}: keep one that runs now"
        )


def _made_at(template: Template) -> str:
    try:
        return template.made_at()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FailedPrecondition(f"the template in {template.directory} can't be read: {error}") from None


def thd_seal(directory: Path, hardware: Hardware) -> None:
    """Sync all files, which only root can read from now on, and write the manifest. Blocks.

    :raise OSError: that fails."""
    for name in _OWN:
        os.chown(directory / name, 0, 0)
        (directory / name).chmod(0o600)
        descriptor = os.open(directory / name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    replace_file(directory / MANIFEST, json.dumps({"files": _files(directory, hardware)}, indent=1) + "\n")


def thd_read(directory: Path, template: Template) -> KeptState:
    """Return the state in a directory, if VMs can start from it now. Blocks.

    :raise FailedPrecondition: they can't; says why."""
    hardware = thd_kept(directory)
    check_fits(directory, hardware, template)
    try:
        expected = json.loads(_content(directory / MANIFEST))["files"]
    except FileNotFoundError:
        raise FailedPrecondition(f"the VM that is kept in {directory} was not prepared") from None
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise FailedPrecondition(
            f"{directory / MANIFEST} can't be read, keep the VM again: {error}"
        ) from None
    try:
        files = _files(directory, hardware)
    except OSError as error:
        raise FailedPrecondition(f"a file of a kept VM is missing, keep it again: {error}") from None
    expected = expected if isinstance(expected, dict) else {}
    if changed := [name for name in files if files[name] != expected.get(name)]:
        raise FailedPrecondition(
            f"the VM in {directory} can't be used, keep it again: changed were {', '.join(changed)[:300]}"
        )
    return KeptState(directory, template, hardware)


def _files(directory: Path, hardware: Hardware) -> dict[str, list[int]]:
    """Return size, inode and time of each file. :raise OSError: one is missing."""
    states = {}
    for name in _OWN:
        status = (directory / name).lstat()
        states[name] = [status.st_size, status.st_ino, status.st_ctime_ns]
    for disk in hardware.disks:
        status = layer_file(directory, disk).lstat()
        states[disk.name] = [status.st_size, status.st_ino, status.st_mtime_ns]
    return states


def _content(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_LARGEST)
