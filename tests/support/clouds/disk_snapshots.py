# SPDX-License-Identifier: Apache-2.0
"""Snapshots of first class disks as vCenter has them, where vcsim lacks something or is kinder:

- a disk with snapshots is neither enlarged nor deleted (vcsim does both);
- a snapshot that does not exist, or whose disk does not, is not found (vcsim: its arguments are invalid);
- disks are made from snapshots, which takes a while, and get other names (vcsim has neither call);
- disks and snapshots hold something.

Sources: vSphere Web Services API reference, `VcenterVStorageObjectManager`, and the limits in the vSphere CSI
driver's manual, "Volume Snapshot and Restore".
"""

from __future__ import annotations

import re
import time
from html import unescape
from typing import TYPE_CHECKING, Any

from pyVmomi import vim

from tests.support.clouds.soap import envelope, fault

if TYPE_CHECKING:
    from tests.support.clouds.first_class_disks import FirstClassDisks

_SNAPSHOT = re.compile(r"<snapshotId[^>]*>\s*<id>([^<]+)</id>")
_NAME = re.compile(r"<name[^>]*>([^<]+)</name>")
_SHOWN_NAME = re.compile(r"(<config>.*?<name>)[^<]*(</name>)", re.DOTALL)
_CREATED = re.compile(r"(<createTime>)[^<]*(</createTime>)")


class DiskSnapshots:
    """One test's.

    :ivar contents: the content of disks by id, and of snapshots by `DISK/SNAPSHOT`.
    :ivar slow: whether the making of a disk lasts until `finish` is called.
    :ivar hides_copies: whether vCenter hides such a disk meanwhile; otherwise it shows it as tentative.
    :ivar hidden: other disks that vCenter does not list yet.
    :ivar ages: by how many seconds earlier disks seem to have been made, by id."""

    def __init__(self, disks: FirstClassDisks) -> None:
        self._disks = disks
        self._names: dict[str, str] = {}  # of disks that were renamed
        self._copies: dict[str, str] = {}  # disks that are being made: their tasks
        self.contents: dict[str, bytes] = {}
        self.slow = False
        self.hides_copies = False
        self.hidden: set[str] = set()
        self.ages: dict[str, float] = {}

    # ---- From outside

    def of(self, disk: str) -> list[str]:
        """Return the ids of a disk's snapshots, as the provider has them."""
        found = self._disks.manager.RetrieveSnapshotInfo(vim.vslm.ID(id=disk), self._disks.datastore)
        return [f"{disk}/{each.id.id}" for each in found.snapshots or ()]

    def name(self, disk: str) -> str:
        """Return a disk's name."""
        return self._names.get(disk) or str(self._disks.get(disk).config.name)

    def take(self, disk: str, description: str) -> str:
        """Take a snapshot, as somebody else would; return its id."""
        before = set(self.of(disk))
        manager, id = self._disks.manager, vim.vslm.ID(id=disk)
        self._disks.wait(manager.VStorageObjectCreateSnapshot_Task(id, self._disks.datastore, description))
        [taken] = set(self.of(disk)) - before
        self.contents[taken] = self.contents.get(disk, b"")
        return taken

    def copying(self) -> list[str]:
        """Return the ids of disks that are being made, the oldest first."""
        return list(self._copies)

    def finish(self, disk: str) -> None:
        """Complete a disk that is being made."""
        del self._copies[disk]

    # ---- Differences of disks

    def is_copied(self, disk: str) -> bool:
        """Whether a disk is still being made."""
        return disk in self._copies

    def is_running(self, task: str) -> bool:
        """Whether a task makes a disk."""
        return task in self._copies.values()

    def refuses_changes(self, disk: str) -> bool:
        """Whether a disk can't be enlarged or deleted."""
        return self.is_copied(disk) or (self._disks.get(disk) is not None and bool(self.of(disk)))

    def shown(self, disk: str, answer: str) -> str:
        """Return a description of a disk of vcsim's with what is known here."""
        if disk in self._names:
            answer = _SHOWN_NAME.sub(
                lambda found: f"{found[1]}{self._names[disk]}{found[2]}", answer, count=1
            )
        if disk in self.ages:
            created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - self.ages[disk]))
            answer = _CREATED.sub(lambda found: f"{found[1]}{created}{found[2]}", answer)
        return answer

    def listed(self, answer: str) -> str:
        """Return a list of disks of vcsim's without those that are hidden."""
        for disk in [*self.hidden, *(self.copying() if self.hides_copies else ())]:
            answer = re.sub(rf"<returnval[^>]*>\s*<id>{disk}</id>\s*</returnval>", "", answer)
        return answer

    # ---- Calls

    def rename(self, disk: str, body: str) -> bytes:
        """Answer RenameVStorageObject."""
        name = _NAME.search(body)
        assert name is not None, body
        if self._disks.get(disk) is None:
            return fault("NotFound")
        self._names[disk] = unescape(name[1])
        return envelope('<RenameVStorageObjectResponse xmlns="urn:vim25"/>')

    def state(self, disk: str) -> bytes:
        """Answer RetrieveVStorageObjectState."""
        if self._disks.get(disk) is None:
            return fault("NotFound")
        tentative = "<tentative>true</tentative>" if self.is_copied(disk) else ""
        answer = "RetrieveVStorageObjectStateResponse"
        return envelope(f'<{answer} xmlns="urn:vim25"><returnval>{tentative}</returnval></{answer}>')

    def has(self, disk: str, body: str) -> bool:
        """Whether there is the snapshot that a request is about."""
        return self._disks.get(disk) is not None and _snapshot(disk, body) in self.of(disk)

    def taken(self, disk: str) -> None:
        """Note what a snapshot holds that was taken now."""
        for id in self.of(disk):
            self.contents.setdefault(id, self.contents.get(disk, b""))

    def make_disk(self, disk: str, body: str) -> str:
        """Make a disk from a snapshot; return the task."""
        name = _NAME.search(body)
        assert name is not None, body
        size = self._disks.get(disk).config.capacityInMB
        made, task = self._disks.made(unescape(name[1]), size)
        self.contents[made] = self.contents[_snapshot(disk, body)]
        if self.slow:
            self._copies[made] = task
        return task


def _snapshot(disk: str, body: str) -> str:
    found: Any = _SNAPSHOT.search(body)
    assert found is not None, body
    return f"{disk}/{found[1]}"
