"""What is kept of the volumes for the next daemon: `SANDBOX/VOLUME.json` below one directory. All blocks."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs
from twisted.logger import Logger

from infranetes.volumes.mounts import Source
from infranetes.volumes.places import Place, Places
from infranetes_common.entries import Entry, Manifest

_log = Logger()


@attrs.frozen
class Record:
    """One volume. `places`: which file systems it is made of, None: whatever is there. `base`: what node and
    VM both had when they last were the same, None where that counts for nothing."""

    source: Source
    writable: bool
    containers: tuple[str, ...]
    places: Places | None
    base: Manifest | None


class Records:
    """:param directory: made when first needed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def load(self) -> dict[str, list[Record]]:
        """By sandbox."""
        found: dict[str, list[Record]] = {}
        for path in sorted(self._directory.glob("*/*.json")):
            try:
                found.setdefault(path.parent.name, []).append(_record(json.loads(path.read_bytes())))
            except (OSError, ValueError, KeyError, TypeError) as error:
                _log.error("{path} is unreadable; its volume is carried no more: {error}",
                           path=str(path), error=error)  # fmt: skip
        return found

    def save(self, sandbox_id: str, record: Record) -> None:
        """Replace it whole."""
        directory = self._directory / sandbox_id
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh = directory / f"{record.source.id}.new"
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "w") as file:
            json.dump(_document(record), file)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(directory / f"{record.source.id}.json")

    def delete(self, sandbox_id: str, volume_id: str) -> None:
        """Unknown: nothing to do."""
        (self._directory / sandbox_id / f"{volume_id}.json").unlink(missing_ok=True)

    def forget(self, sandbox_id: str) -> None:
        """All of a sandbox's."""
        shutil.rmtree(self._directory / sandbox_id, ignore_errors=True)

    def keep_only(self, sandbox_ids: Iterable[str]) -> None:
        """Forget those of sandboxes that are no more."""
        known = set(sandbox_ids)
        for path in self._directory.glob("*"):
            if path.name not in known:
                self.forget(path.name)


def _document(record: Record) -> dict[str, Any]:
    base = None
    if record.base is not None:
        base = [
            [os.fsdecode(one.path), one.kind, one.mode, one.uid, one.gid, one.size, one.mtime,
             os.fsdecode(one.target)]
            for one in record.base.values()
        ]  # fmt: skip
    return {
        **attrs.asdict(record.source),
        "writable": record.writable,
        "containers": record.containers,
        "places": record.places
        and [
            [os.fsdecode(path), place.device, os.fsdecode(place.path)]
            for path, place in record.places.items()
        ],
        "base": base,
    }


def _record(document: Any) -> Record:
    base: Manifest | None = None
    if document["base"] is not None:
        base = {}
        for path, kind, mode, uid, gid, size, mtime, target in document["base"]:
            entry = Entry(os.fsencode(path), kind, mode, uid, gid, size, mtime, os.fsencode(target))
            base[entry.path] = entry
    places: Places | None = None
    if document["places"] is not None:
        places = {
            os.fsencode(at): Place(device, os.fsencode(path)) for at, device, path in document["places"]
        }
    source = Source(str(document["path"]), bool(document["file"]), bool(document["in_memory"]))
    return Record(source, bool(document["writable"]), tuple(document["containers"]), places, base)
