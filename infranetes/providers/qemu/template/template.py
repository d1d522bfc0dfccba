# SPDX-License-Identifier: Apache-2.0
"""The template on disk: RAM, device state and disk of a VM that was booted once. Each pod's VM is its clone.

The template's VM was stopped when its agent asked for an identity. A template belongs to one guest image, one
QEMU and one command line: the name of its directory is a hash of them. The manifest has the inodes and change
times of its files, so that a template which anyone has touched is not used.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

import attrs

from infranetes.guest.image import GuestImage
from infranetes.providers.qemu.program.command_line import CommandLine, Fd
from infranetes.providers.qemu.program.open_files import OpenFiles
from infranetes.providers.qemu.settings import MIB
from infranetes.providers.qemu.vm.sizes import Hotplug

RAM, STATE, DISK, OVERLAY = "ram", "state", "disk.qcow2", "overlay.qcow2"
PARTS = (RAM, STATE, DISK, OVERLAY)
IMAGES = "images"  # a further part of a template with preloaded images
_MANIFEST, _LAST_USED = "manifest.json", "used"


def template_key(command_line: CommandLine, image: GuestImage) -> str:
    """Return the name of the directory of the template with this command line and image."""
    inputs = "\0".join(command_line.template_inputs(image.key))
    return hashlib.sha256(inputs.encode()).hexdigest()[:24]


@attrs.frozen
class Template:
    """A template in its directory."""

    directory: Path
    command_line: CommandLine
    image: GuestImage

    @property
    def template(self) -> Template:
        """Itself, as what a VM starts from."""
        return self

    @property
    def disk(self) -> int:
        """The size of its disk in bytes."""
        return self.command_line.disk_mib * MIB

    @property
    def more(self) -> Hotplug:
        """Nothing: the hardware beyond it that it has."""
        return Hotplug(0, 0)

    def clone_arguments(self) -> list[str]:
        """Return the arguments for a clone."""
        return self.command_line.clone_arguments()

    @property
    def overlay(self) -> Path:
        """An empty disk over the template's, of which each VM gets a copy."""
        return self.directory / OVERLAY

    @property
    def ram(self) -> Path:
        """The file of the template's memory; clones get it through `ram.SharedRam`."""
        return self.directory / RAM

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of its files."""
        return (*PARTS, IMAGES) if self.command_line.preload else PARTS

    def open_for_clone(self, files: OpenFiles) -> None:
        """Open the files that a clone starts from, except the memory. :raise OSError: one is missing."""
        files.open(Fd.STATE, self.directory / STATE)
        self.open_disks(files)

    def open_disks(self, files: OpenFiles) -> None:
        """Open what the disks of its clones are layers of. :raise OSError: a file is missing."""
        files.open(Fd.TEMPLATE_DISK, self.directory / DISK)
        self.open_image_files(files)

    def open_image_files(self, files: OpenFiles) -> None:
        """Open the files that each QEMU with its devices has. :raise OSError: one is missing."""
        self._open_image_files(files, self.directory)

    def open_for_boot(self, files: OpenFiles, directory: Path) -> None:
        """Open what it is booted from. :param directory: where its own parts are."""
        self._open_image_files(files, directory)
        files.open(Fd.KERNEL, self.image.kernel)
        files.open(Fd.INITRD, self.image.initrd)

    def _open_image_files(self, files: OpenFiles, directory: Path) -> None:
        files.open(Fd.IMAGE_DISK, self.image.disk)
        if self.command_line.preload:
            files.open(Fd.IMAGES, directory / IMAGES)

    def intact(self) -> bool:
        """Return whether all its files are there and unchanged since it was made."""
        try:
            manifest = json.loads((self.directory / _MANIFEST).read_bytes())
            return bool(manifest["parts"] == self._file_states(self.directory))
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def made_at(self) -> str:
        """Return when it was made, by which it differs from another one with the same key.

        :raise OSError, ValueError, KeyError: it is not there."""
        return repr(json.loads((self.directory / _MANIFEST).read_bytes())["made_at"])

    def mark_used(self) -> None:
        """Record that it was used now; templates that are not used for long are removed."""
        (self.directory / _LAST_USED).touch()

    def seal(self, directory: Path) -> None:
        """Sync its files, which are in `directory` now, then write the manifest. Blocks."""
        for part in self.parts:
            path = directory / part
            os.chown(path, 0, -1)
            path.chmod(0o600 if part == RAM else 0o644)
            _sync(path)
        manifest = {"parts": self._file_states(directory), "made_at": time.time(), "image": self.image.key}
        (directory / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        _sync(directory / _MANIFEST)
        _sync(directory)

    def _file_states(self, directory: Path) -> dict[str, list[int]]:
        """Size, inode and change time of its files and the image's. :raise OSError: one is missing."""
        image = self.image
        paths = [*(directory / part for part in self.parts), image.disk, image.kernel, image.initrd]
        states = {}
        for path in paths:
            status = path.stat()
            name = path.name if path.parent == directory else str(path)
            states[name] = [status.st_size, status.st_ino, status.st_ctime_ns]
        return states


def last_used(directory: Path) -> float:
    """Return when the template in `directory` was last used, in seconds since 1970; 0.0: never."""
    try:
        return (directory / _LAST_USED).stat().st_mtime
    except OSError:
        return 0.0


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
