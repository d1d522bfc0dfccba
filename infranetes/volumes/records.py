# SPDX-License-Identifier: Apache-2.0
"""The records of volumes that a restarted daemon needs, in one directory: `SANDBOX/VOLUME.json` for carried
volumes, `SANDBOX/VOLUME.own` for the VM's own. Everything here blocks."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NotRequired, TypedDict, TypeVar

import attrs
from twisted.logger import Logger

from infranetes.volumes.mount_table import Layout, Location
from infranetes.volumes.mounts import Source
from infranetes_common.concurrency import replace_file
from infranetes_common.filesync.manifest import Entry, Manifest
from infranetes_common.user_namespaces import IdRange, UserNamespace

R = TypeVar("R")
_log = Logger()


@attrs.frozen
class VolumeRecord:
    """The record of one carried volume.

    :ivar users: the user namespace in which the pod sees the files' ids; None: ids are as on the node.
    :ivar layout: the locations it is made of; None: whatever is mounted there.
    :ivar base: the content of node and VM when they last were equal; None: not known, or not needed."""

    source: Source
    writable: bool
    containers: tuple[str, ...]
    layout: Layout | None
    base: Manifest | None
    users: UserNamespace | None = None


@attrs.frozen
class OwnRecord:
    """The record of a volume that is the VM's own and has been made in it.

    :ivar vm: which VM. :ivar users: as above."""

    source: Source
    vm: str
    users: UserNamespace | None = None


class _Document(TypedDict):
    """The file of a volume that is carried."""

    path: str
    file: bool
    in_memory: bool
    writable: bool
    containers: list[str]
    places: list[tuple[str, str, str]] | None  # path in the directory, device, path in the file system
    base: list[tuple[str, str, int, int, int, int, int, str]] | None  # the fields of each Entry
    users: NotRequired[list[tuple[int, int]]]  # first id and number of the users, and of the groups


class _OwnDocument(TypedDict):
    """The file of a volume that is the VM's own."""

    path: str
    in_memory: bool
    vm: str
    users: NotRequired[list[tuple[int, int]]]
    size_limit: NotRequired[int]
    huge_page_size: NotRequired[int]


class VolumeRecords:
    """The records of volumes, a file each. :param directory: made when first needed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def load(self) -> dict[str, list[VolumeRecord]]:
        """Records of volumes that are carried, by sandbox. One that can't be read is logged and left out."""
        return self._load("json", _record, "is no longer kept in sync")

    def load_own(self) -> dict[str, list[OwnRecord]]:
        """Records of VMs' own volumes, as `load`."""
        return self._load("own", _own_record, "is empty for the sandbox's next container")

    def _load(self, kind: str, parse: Callable[[Any], R], lost: str) -> dict[str, list[R]]:
        # Any: what json.loads returns
        found: dict[str, list[R]] = {}
        for path in sorted(self._directory.glob(f"*/*.{kind}")):
            try:
                found.setdefault(path.parent.name, []).append(parse(json.loads(path.read_bytes())))
            except (OSError, ValueError, KeyError, TypeError) as error:
                _log.error("{path} is unreadable; its volume {lost}: {error}",
                           path=str(path), lost=lost, error=error)  # fmt: skip
        return found

    def save(self, sandbox_id: str, record: VolumeRecord) -> None:
        """Write the record in place of any of the same volume."""
        self._write(sandbox_id, f"{record.source.id}.json", _document(record))

    def save_own(self, sandbox_id: str, record: OwnRecord) -> None:
        """Write the record in place of any of the same volume."""
        source = record.source
        document: _OwnDocument = {
            "path": source.path, "in_memory": source.in_memory, "vm": record.vm,
            "size_limit": source.size_limit, "huge_page_size": source.huge_page_size,
        }  # fmt: skip
        if record.users is not None:
            document["users"] = _ranges(record.users)
        self._write(sandbox_id, f"{source.id}.own", document)

    def _write(self, sandbox_id: str, name: str, document: _Document | _OwnDocument) -> None:
        directory = self._directory / sandbox_id
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(directory / name, json.dumps(document))

    def delete(self, sandbox_id: str, volume_id: str) -> None:
        """Delete the record of one volume. Idempotent."""
        (self._directory / sandbox_id / f"{volume_id}.json").unlink(missing_ok=True)

    def forget(self, sandbox_id: str) -> None:
        """Delete all records of a sandbox."""
        shutil.rmtree(self._directory / sandbox_id, ignore_errors=True)

    def keep_only(self, sandbox_ids: Iterable[str]) -> None:
        """Delete the records of all other sandboxes."""
        kept = set(sandbox_ids)
        for path in self._directory.glob("*"):
            if path.name not in kept:
                self.forget(path.name)


def _document(record: VolumeRecord) -> _Document:
    source, layout, base = record.source, record.layout, record.base
    document: _Document = {
        "path": source.path,
        "file": source.file,
        "in_memory": source.in_memory,
        "writable": record.writable,
        "containers": list(record.containers),
        "places": None
        if layout is None
        else [
            (os.fsdecode(path), location.device, os.fsdecode(location.path))
            for path, location in layout.items()
        ],
        "base": None
        if base is None
        else [
            (os.fsdecode(one.path), one.kind, one.mode, one.uid, one.gid, one.size, one.mtime,
             os.fsdecode(one.target))
            for one in base.values()
        ],
    }  # fmt: skip
    if record.users is not None:
        document["users"] = _ranges(record.users)
    return document


def _ranges(users: UserNamespace) -> list[tuple[int, int]]:
    return [(ids.first, ids.length) for ids in (users.uids, users.gids)]


def _users(document: _Document | _OwnDocument) -> UserNamespace | None:
    if "users" not in document:
        return None
    return UserNamespace(*(IdRange(first, length) for first, length in document["users"]))


def _own_record(document: _OwnDocument) -> OwnRecord:
    sizes = int(document.get("size_limit", 0)), int(document.get("huge_page_size", 0))
    source = Source(str(document["path"]), False, bool(document["in_memory"]), *sizes)
    return OwnRecord(source, str(document["vm"]), _users(document))


def _record(document: _Document) -> VolumeRecord:
    base: Manifest | None = None
    if document["base"] is not None:
        base = {}
        for path, kind, mode, uid, gid, size, mtime, target in document["base"]:
            entry = Entry(os.fsencode(path), kind, mode, uid, gid, size, mtime, os.fsencode(target))
            base[entry.path] = entry
    layout: Layout | None = None
    if document["places"] is not None:
        layout = {
            os.fsencode(path): Location(device, os.fsencode(inner))
            for path, device, inner in document["places"]
        }
    source = Source(str(document["path"]), bool(document["file"]), bool(document["in_memory"]))
    containers = tuple(document["containers"])
    return VolumeRecord(source, bool(document["writable"]), containers, layout, base, _users(document))
