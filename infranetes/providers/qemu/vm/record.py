# SPDX-License-Identifier: Apache-2.0
"""The record of each VM, kept in a directory of its own: enough to find the VM again and to end it.

phase      meaning                                       process
STARTING   a daemon is making it, or was                 may be there
READY      its agent has its identity, or it boots an    there, or the VM has ended
           image and is prepared
FAILED     it ended before that; `detail` says why       gone

Directories appear whole, by renaming, and disappear the same way. What is half made or half removed has a
name that begins with a dot, and is removed at the next start.
"""

from __future__ import annotations

import enum
import json
import os
import re
import shutil
from collections.abc import Callable
from ipaddress import IPv4Address
from pathlib import Path

import attrs
from twisted.logger import Logger

from infranetes.providers.interface import Attachment
from infranetes.providers.qemu.network.bridge import BridgePort
from infranetes_common.concurrency import replace_file
from infranetes_common.identity import AGENT_PORT

RECORD, DISK, CONSOLE, OUTPUT = "vm.json", "disk.qcow2", "console.log", "qemu.log"
ORIGIN = "origin.json"  # a part of the record, which the release before could not read in `RECORD`
_OF_ORIGIN = ("template", "template_made_at", "image", "kept")
_NEW, _GONE = ".new-", ".gone-"
_ID = re.compile(r"qemu-([0-9a-f]{32})")
_TOKEN = re.compile(r"[0-9a-f]{32}")
_log = Logger()


class Phase(enum.Enum):
    """The stages of making a VM. One that boots an image has no identity; it is READY once it is prepared."""

    STARTING = "starting"
    READY = "ready"
    FAILED = "failed"


@attrs.frozen
class Guest:
    """The life of a guest that boots an image. Times are nanoseconds since 1970 UTC; 0: not yet.

    `started_at` is recorded before it executes: whether it does, QEMU says."""

    started_at: int = 0
    finished_at: int = 0
    crashed: bool = False
    exit_code: int = 0  # as in GuestStatus
    reason: str = ""
    message: str = ""


@attrs.frozen
class VmRecord:
    """The record of one VM."""

    token: str
    sandbox_id: str
    cluster: str
    node: str
    address: str
    created_at: float
    uid: int = 0  # the uid and gid of its process; 0: not known, as the record can't be read
    phase: Phase = Phase.STARTING
    agent_port: int = 0
    detail: str = ""
    attachment: Attachment | None = None  # as in its VmRequest; None: it is on the bridge
    cgroup_parent: str = ""  # the control group in which it counts, which its VmRequest may have named
    more_addresses: tuple[str, ...] = ()  # as in Instance
    guest: Guest | None = None  # None: it is a clone of the template
    root: str = ""  # the id of the volume that is its root; "": its root goes with it
    template: str = ""  # the key of the template that it is a clone of; "": it is none, or not known
    template_made_at: str = ""  # see `Template.made_at`; "": not known
    image: str = ""  # the key of that template's guest image
    kept: str = ""  # the directory of the kept state from which it was started; "": from the template's

    @property
    def id(self) -> str:
        """The instance's id."""
        return instance_id(self.token)

    @property
    def process_name(self) -> str:
        """The argument by which its QEMU process is found."""
        return f"guest=infranetes-{self.token}"

    @property
    def tap(self) -> str:
        """The VM's network interface on the node, which exists as long as its process."""
        return f"inf{self.token[:12]}"

    @property
    def on_bridge(self) -> bool:
        """Whether the VM is on the pods' bridge and has an address of its subnet."""
        return self.attachment is None

    @property
    def bridge_port(self) -> BridgePort:
        """The VM's port on the pods' bridge."""
        # What boots an image may know nothing of Services.
        served = self.guest is not None
        return BridgePort(self.tap, self.address, self.agent_port or AGENT_PORT, served)


def instance_id(token: str) -> str:
    """Return the id of the VM with this token."""
    return f"qemu-{token}"


def token_of(instance: str) -> str | None:
    """Return the token in an instance's id; None: no VM of this provider has such an id."""
    match = _ID.fullmatch(instance)
    return match[1] if match else None


class VmRecords:
    """The directory of VMs. Every method blocks while it reads or writes small files."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def directory_of(self, token: str) -> Path:
        """Return the directory of one VM."""
        return self._directory / token

    def open(self) -> list[VmRecord]:
        """Remove what an earlier daemon left half done, and read every record."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for leftover in self._directory.glob(".*"):
            shutil.rmtree(leftover, ignore_errors=True)
        return self.read()

    def read(self) -> list[VmRecord]:
        """Read every record."""
        paths = [path for path in self._directory.glob("[!.]*") if _TOKEN.fullmatch(path.name)]
        return [self._read(path) for path in sorted(paths)]

    def _read(self, path: Path) -> VmRecord:
        try:
            fields = json.loads((path / RECORD).read_bytes()) | _origin(path)
            IPv4Address(fields["address"])  # always valid: it is known before there is a record
            fields["more_addresses"] = tuple(fields.get("more_addresses", ()))
            if (joined := fields.get("attachment")) is not None:
                fields["attachment"] = Attachment(Path(joined["namespace"]), joined["interface"])
            if (guest := fields.get("guest")) is not None:
                fields["guest"] = Guest(**guest)
            return VmRecord(**{**fields, "phase": Phase(fields["phase"]), "token": path.name})
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            # The VM has to stay listed, or nothing would ever end it.
            _log.error("{path} can't be read: {error}", path=str(path / RECORD), error=str(error))
            return VmRecord(
                path.name,
                "",
                "",
                "",
                "0.0.0.0",  # noqa: S104  no address
                0.0,
                phase=Phase.FAILED,
                detail=f"its record can't be read: {error}",
            )

    def add(self, record: VmRecord, overlay: Path) -> None:
        """Make a new VM's directory, with its record, a copy of the empty disk `overlay`, and its console.

        :raise OSError: it can't be made; nothing of it is left.
        """

        def fill(work: Path) -> None:
            shutil.copyfile(overlay, work / DISK)
            for name in (DISK, CONSOLE):
                (work / name).touch()
                (work / name).chmod(0o600)
                os.chown(work / name, record.uid, record.uid)

        self.add_filled(record, fill)

    def add_filled(self, record: VmRecord, fill: Callable[[Path], None]) -> None:
        """Make a new VM's directory, with its record and what `fill` puts into it.

        :raise OSError: it can't be made; nothing of it is left. Likewise for what `fill` raises.
        """
        work = self._directory / f"{_NEW}{record.token}"
        shutil.rmtree(work, ignore_errors=True)
        try:
            work.mkdir(mode=0o700)
            # Not synced, as the VM does not survive a loss of power either.
            (work / RECORD).write_text(_encode(record))
            (work / ORIGIN).write_text(
                json.dumps({name: getattr(record, name) for name in _OF_ORIGIN}) + "\n"
            )
            fill(work)
            work.rename(self.directory_of(record.token))
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise

    def update(self, record: VmRecord) -> None:
        """Replace the record. :raise OSError: the old one is still there."""
        replace_file(self.directory_of(record.token) / RECORD, _encode(record), durable=False)  # as in `add`

    def hide(self, token: str) -> Path:
        """Take a VM off the list. Returns its directory, which the caller removes."""
        gone = self._directory / f"{_GONE}{token}"
        shutil.rmtree(gone, ignore_errors=True)
        self.directory_of(token).rename(gone)
        return gone


def _encode(record: VmRecord) -> str:
    fields = {**attrs.asdict(record), "phase": record.phase.value}
    values = {name: value for name, value in fields.items() if name not in _OF_ORIGIN}
    return json.dumps(values, default=os.fspath) + "\n"


def _origin(path: Path) -> dict[str, str]:
    """Return that part of a VM's record; of a VM of an earlier release there is none.

    :raise OSError, ValueError, AttributeError: it can't be read."""
    try:
        fields = json.loads((path / ORIGIN).read_bytes())
    except FileNotFoundError:
        return {}
    return {name: str(fields.get(name, "")) for name in _OF_ORIGIN}
