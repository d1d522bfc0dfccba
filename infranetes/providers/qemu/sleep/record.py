# SPDX-License-Identifier: Apache-2.0
"""The record that a VM sleeps, in the VM's directory.

stage      process                          memory      the next daemon
SAVING     there; it may be stopped         in part     lets it go on, and removes the memory
ASLEEP     none, or one that is to end      whole       ends a process, and has the VM's tap
GOING ON   there; it executes, or is to     whole, old  lets it go on, and removes the memory
(none)     there                            none

From ASLEEP on the VM executes nothing: its disks are as they were when its memory was written. From GOING ON
they may not be, so that this memory is never used again. A process that loads the memory is ASLEEP's: until
GOING ON is recorded it may be ended, and another one started.
"""

from __future__ import annotations

import enum
import json
from pathlib import Path

import attrs

from infranetes.providers.qemu.keep.hardware import Hardware, decode
from infranetes_common.concurrency import replace_file

RECORD, MEMORY = "sleep.json", "sleep.memory"
_LARGEST = 4 << 20  # bytes of JSON that are read
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Stage(enum.Enum):
    """See the table above."""

    SAVING = "saving"
    ASLEEP = "asleep"
    GOING_ON = "going on"


@attrs.frozen
class SleptVolume:
    """A volume that the VM has. :ivar id: the volume's."""

    id: str
    serial: str
    lun: int
    read_only: bool


@attrs.frozen
class SleepRecord:
    """How a VM sleeps, and what its next process needs.

    :ivar boot_id: of the node's kernel. :ivar arguments: QEMU's. :ivar hardware: what it had beyond these.
    :ivar files: the paths of the files that its process inherits, by their numbers (`command_line.Fd`).
    :ivar memory: size, inode and time of the last change of the memory's file; empty: it is not whole."""

    stage: Stage
    boot_id: str
    program: str
    version: str
    arguments: tuple[str, ...]
    files: tuple[tuple[int, str], ...]
    hardware: Hardware
    volumes: tuple[SleptVolume, ...] = ()
    memory: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """The bytes of its memory's file; 0: it is not whole."""
        return self.memory[0] if self.memory else 0


def thd_boot_id() -> str:
    """Return what the running kernel is known by. Blocks."""
    return _BOOT_ID.read_text().strip()


def thd_memory(directory: Path) -> tuple[int, ...]:
    """Return size, inode and time of the last change of a memory's file. Blocks.

    :raise OSError: it is gone."""
    status = (directory / MEMORY).lstat()
    return status.st_size, status.st_ino, status.st_ctime_ns


def thd_write(directory: Path, record: SleepRecord) -> None:
    """Write the record. Not synced: a VM that sleeps does not survive a loss of power either. Blocks.

    :raise OSError: the one before is still there."""
    fields = attrs.asdict(record, recurse=False)
    fields |= {
        "stage": record.stage.value,
        "hardware": record.hardware.encode().decode(),
        "volumes": [attrs.asdict(each) for each in record.volumes],
    }
    replace_file(directory / RECORD, json.dumps(fields) + "\n", durable=False)


def thd_read(directory: Path) -> SleepRecord | None:
    """Return the record; None: the VM does not sleep. Blocks. :raise ValueError: it can't be read."""
    try:
        with (directory / RECORD).open("rb") as file:
            fields = json.loads(file.read(_LARGEST))
        fields["stage"] = Stage(fields["stage"])
        fields["hardware"] = decode(fields["hardware"].encode())
        fields["arguments"] = tuple(map(str, fields["arguments"]))
        fields["files"] = tuple((int(number), str(path)) for number, path in fields["files"])
        fields["volumes"] = tuple(SleptVolume(**each) for each in fields["volumes"])
        fields["memory"] = tuple(map(int, fields["memory"]))
        return SleepRecord(**fields)
    except FileNotFoundError:
        return None
    except (OSError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{directory / RECORD} can't be read: {error}") from None


def thd_remove(directory: Path) -> None:
    """Remove the record, and then the memory. Idempotent. Blocks. :raise OSError: one can't be removed."""
    (directory / RECORD).unlink(missing_ok=True)
    (directory / MEMORY).unlink(missing_ok=True)
