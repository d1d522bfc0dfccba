"""What the node keeps of each VM, in a directory of its own; enough to find it again and to end it.

phase      meaning                                       process
STARTING   asked for; a daemon is, or was, making it     may be there
READY      its agent has taken on its identity           there, or the VM has ended
FAILED     it ended before that; `detail` says why       gone

A directory appears whole, by renaming, and goes the same way: what is half made or half removed has a
name with a dot and is swept away at the next start.
"""

from __future__ import annotations

import enum
import json
import os
import re
import shutil
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import attrs
from twisted.logger import Logger

RECORD, DISK, CONSOLE, OUTPUT = "vm.json", "disk.qcow2", "console.log", "qemu.log"
_NEW, _GONE = ".new-", ".gone-"
_ID = re.compile(r"qemu-([0-9a-f]{32})")
_TOKEN = re.compile(r"[0-9a-f]{32}")
_log = Logger()


class Phase(enum.Enum):
    """How far a VM's making has come."""

    STARTING = "starting"
    READY = "ready"
    FAILED = "failed"


@attrs.frozen
class Record:
    """One VM."""

    token: str
    sandbox_id: str
    cluster: str
    node: str
    address: str
    created_at: float
    phase: Phase = Phase.STARTING
    agent_port: int = 0
    detail: str = ""

    @property
    def id(self) -> str:
        """The instance's id."""
        return instance_id(self.token)

    @property
    def process_name(self) -> str:
        """The word in QEMU's arguments by which its process is found."""
        return f"guest=infranetes-{self.token}"

    @property
    def tap(self) -> str:
        """Its network interface on the node; goes with QEMU's process."""
        return f"inf{self.token[:12]}"


def instance_id(token: str) -> str:
    """The id of the VM that `token` stands for."""
    return f"qemu-{token}"


def token_of(instance: str) -> str | None:
    """The token in an instance's id; None: nothing of ours has such an id."""
    found = _ID.fullmatch(instance)
    return found[1] if found else None


class Records:
    """The directory of VMs. Every method blocks for as long as small files take."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def of(self, token: str) -> Path:
        """The directory of one VM."""
        return self._directory / token

    def open(self) -> list[Record]:
        """Sweep away what an earlier daemon left half done; every VM there is."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for leftover in self._directory.glob(".*"):
            shutil.rmtree(leftover, ignore_errors=True)
        return self.read()

    def read(self) -> list[Record]:
        """Every VM there is."""
        paths = [path for path in self._directory.glob("[!.]*") if _TOKEN.fullmatch(path.name)]
        return [self._read(path) for path in sorted(paths)]

    def _read(self, path: Path) -> Record:
        try:
            fields: dict[str, Any] = json.loads((path / RECORD).read_bytes())
            IPv4Address(fields["address"])
            return Record(**{**fields, "phase": Phase(fields["phase"]), "token": path.name})
        except (OSError, ValueError, TypeError, KeyError) as error:
            # It must stay visible, or nothing would ever end it.
            _log.error("{path} can't be read: {error}", path=str(path / RECORD), error=str(error))
            return Record(
                path.name,
                "",
                "",
                "",
                "0.0.0.0",  # noqa: S104  no address
                0.0,
                Phase.FAILED,
                detail=f"its record can't be read: {error}",
            )

    def add(self, record: Record, overlay: Path, owner: tuple[int, int]) -> None:
        """Make the directory of a new VM: record, empty disk, empty console.

        :raise OSError: it can't be made; nothing of it is left.
        """
        work = self._directory / f"{_NEW}{record.token}"
        shutil.rmtree(work, ignore_errors=True)
        try:
            work.mkdir(mode=0o700)
            _write(work / RECORD, record)
            shutil.copyfile(overlay, work / DISK)
            for name in (DISK, CONSOLE):
                (work / name).touch()
                (work / name).chmod(0o600)
                os.chown(work / name, *owner)
            work.rename(self.of(record.token))
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise

    def update(self, record: Record) -> None:
        """Keep the record as it is now. :raise OSError: the old one is still there."""
        _write(self.of(record.token) / RECORD, record)

    def hide(self, token: str) -> Path:
        """Take a VM out of those there are; the directory that is left to be removed."""
        gone = self._directory / f"{_GONE}{token}"
        shutil.rmtree(gone, ignore_errors=True)
        self.of(token).rename(gone)
        return gone


def _write(path: Path, record: Record) -> None:
    fields = attrs.asdict(record)
    fields["phase"] = record.phase.value
    beside = path.with_name(path.name + ".new")
    beside.write_text(json.dumps(fields) + "\n")
    beside.replace(path)


def tail(path: Path, size: int = 2000) -> str:
    """The end of a console's file, for people: printable, without the terminal's control sequences."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - size))
            text = file.read(size).decode("utf-8", "replace")
    except OSError:
        return ""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Z0-9]", "", text)
    return "".join(each for each in text if each.isprintable() or each == "\n").strip()


def trim(path: Path, keep: int) -> None:
    """Keep the last `keep` bytes, or half of it, of a file that QEMU goes on appending to."""
    if path.stat().st_size <= keep:
        return
    with path.open("r+b") as file:
        file.seek(-keep // 2, os.SEEK_END)
        rest = file.read(keep // 2)
        file.truncate(0)
        file.seek(0)
        file.write(rest)
