# SPDX-License-Identifier: Apache-2.0
"""The names of first class disks and their snapshots at the vCenter, which are all that it keeps of a volume.

CLUSTER-VOLUME             a volume, its file, and likewise a snapshot's description
CLUSTER-VOLUME-SNAPSHOT    a volume that was made from a snapshot
CLUSTER+VOLUME+SNAPSHOT    such a volume while it is being made: no volume yet

CLUSTER and VOLUME are made of hashes, so that any text can be a name. SNAPSHOT is a snapshot's whole id, as
nothing else at the vCenter tells what a disk began with. A name has 80 characters at most, as all names at a
vCenter: where SNAPSHOT takes 43 of them, VOLUME is shorter.
"""

from __future__ import annotations

import base64
import hashlib
import re
from uuid import UUID

from infranetes.providers.volumes import FromSnapshot

_ID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_SHORT = 12  # characters of VOLUME in names of copies
_COPY = re.compile(rf"(?P<sign>[+-])(?P<volume>[\w-]{{{_SHORT}}})(?P=sign)(?P<source>[\w-]{{43}})", re.ASCII)


def is_disk_id(text: str) -> bool:
    """Whether this could be a first class disk's id."""
    return _ID.fullmatch(text) is not None


def snapshot_id(disk: str, snapshot: str) -> str:
    """Return the id of a disk's snapshot, which vCenter knows by both ids alone."""
    return f"{disk}/{snapshot}"


def is_snapshot_id(text: str) -> bool:
    """Whether this could be a snapshot's id."""
    disk, _, snapshot = text.partition("/")
    return is_disk_id(disk) and is_disk_id(snapshot)


class DiskNames:
    """The names of one cluster's disks. :ivar folder: that of their files, with which all names begin."""

    def __init__(self, cluster: str) -> None:
        self.folder = f"infranetes-{hashlib.sha256(cluster.encode()).hexdigest()[:12]}"

    def of(self, name: str) -> str:
        """Return the name at the vCenter of a volume, or the description of a snapshot, of this name."""
        return f"{self.folder}-{hashlib.sha256(name.encode()).hexdigest()[:40]}"

    def copy_of(self, name: str, source: FromSnapshot, whole: bool = True) -> str:
        """Return the name at the vCenter of a volume that is made from a snapshot.

        :param whole: whether it is completely made."""
        sign = "-" if whole else "+"
        ids = b"".join(UUID(id).bytes for id in source.id.split("/"))
        return f"{self.folder}{sign}{_short(name)}{sign}{_text(ids)}"

    def keys(self, name: str) -> tuple[str, ...]:
        """Return the keys, as of `key`, of all names that the volume may have at the vCenter."""
        return (self.of(name), f"{self.folder}-{_short(name)}")

    def key(self, disk_name: str) -> str:
        """Return the part of a disk's name that all disks for one volume share."""
        copy = self._copy(disk_name)
        return disk_name if copy is None or copy["sign"] == "+" else disk_name[: copy.end("volume")]

    def is_ours(self, disk_name: str) -> bool:
        """Whether this is the name of a volume, or the description of a snapshot, of the cluster's."""
        return disk_name.startswith(f"{self.folder}-")

    def is_unfinished(self, disk_name: str) -> bool:
        """Whether this is the name of a volume of the cluster's that is still being made."""
        copy = self._copy(disk_name)
        return copy is not None and copy["sign"] == "+"

    def unfinished(self, disk_name: str) -> str:
        """Return the name that a volume had while it was made from a snapshot; "": it was not made from
        one."""
        copy = self._copy(disk_name)
        return "" if copy is None else f"{self.folder}+{copy['volume']}+{copy['source']}"

    def source(self, disk_name: str) -> FromSnapshot | None:
        """Return the source of a disk of this name; None: it began with zeros."""
        copy = self._copy(disk_name)
        if copy is None:
            return None
        ids = base64.urlsafe_b64decode(copy["source"] + "=")
        return FromSnapshot(snapshot_id(str(UUID(bytes=ids[:16])), str(UUID(bytes=ids[16:]))))

    def _copy(self, disk_name: str) -> re.Match[str] | None:
        if not disk_name.startswith(self.folder):
            return None
        return _COPY.fullmatch(disk_name, len(self.folder))


def _short(name: str) -> str:
    return _text(hashlib.sha256(name.encode()).digest())[:_SHORT]


def _text(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).decode().rstrip("=")
