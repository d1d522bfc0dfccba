# SPDX-License-Identifier: Apache-2.0
"""The files of snapshots: directories in that of volumes, each with a file like a volume's.

name                           what it is
snapshots/ID.snapshot          a snapshot: `disk.raw`, what it holds, and `about.json`
snapshots/ID.snapshot.partial  one that is being taken or removed; the next daemon removes a killed one's

Everything here blocks.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path

import attrs

from infranetes.providers.qemu.volumes.files import RootRecord, as_error, is_id
from infranetes.providers.volumes import VolumeSnapshot
from infranetes_common.concurrency import replace_file, sync_directory
from infranetes_common.errors import NotFound

_DIRECTORY = "snapshots"
_SUFFIX = ".snapshot"
_PARTIAL = ".partial"  # after the suffix
_DISK = "disk.raw"
_ABOUT = "about.json"


class SnapshotFiles:
    """The files. No two methods may run at once for one snapshot.

    :param volumes: the directory of volumes."""

    def __init__(self, volumes: Path) -> None:
        self._directory = volumes / _DIRECTORY

    def disk(self, snapshot_id: str) -> Path:
        """Return the file with a snapshot's content. :raise NotFound: there is none."""
        self.get(snapshot_id)
        return self._path(snapshot_id) / _DISK

    def get(self, snapshot_id: str) -> VolumeSnapshot:
        path = self._path(snapshot_id)
        try:
            size = os.stat(path / _DISK).st_size
            about = json.loads((path / _ABOUT).read_text())
            return VolumeSnapshot(snapshot_id, str(about["volume"]), size, float(about["created"]))
        except FileNotFoundError:
            raise _no_snapshot(snapshot_id) from None
        except OSError as error:
            raise as_error(error, f"snapshot {snapshot_id} can't be looked at ({path})") from None
        except (ValueError, KeyError, TypeError):
            raise NotFound(f"{path / _ABOUT} does not say what snapshot {snapshot_id} is of") from None

    def root(self, snapshot_id: str) -> RootRecord | None:
        """Return what is known of a snapshot's content as a root; None: nothing."""
        try:
            match json.loads((self._path(snapshot_id) / _ABOUT).read_text()):
                case {"root": {"digest": str(digest), "whole": bool(whole)}}:
                    return RootRecord(digest, whole)
        except (OSError, ValueError):
            pass
        return None

    def all(self) -> list[VolumeSnapshot]:
        found = []
        for name in self._names():
            with contextlib.suppress(NotFound):  # removed meanwhile, or not a snapshot
                found.append(self.get(name.removesuffix(_SUFFIX)))
        return sorted(found, key=lambda each: each.id)

    def begin(self, snapshot_id: str) -> Path:
        """Begin a snapshot. Return the file for its content, which is not there yet."""
        partial = self._partial(snapshot_id)
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(mode=0o700)
        except OSError as error:
            raise as_error(error, f"snapshot {snapshot_id} can't be made in {self._directory}") from None
        return partial / _DISK

    def finish(
        self, snapshot_id: str, volume: str, created: float, root: RootRecord | None = None
    ) -> VolumeSnapshot:
        """Make what was begun a snapshot. :param root: what is known of its content as a root."""
        partial = self._partial(snapshot_id)
        try:
            about: dict[str, object] = {"volume": volume, "created": created}
            if root is not None:
                about["root"] = attrs.asdict(root)
            replace_file(partial / _ABOUT, json.dumps(about))
            partial.rename(self._path(snapshot_id))
            sync_directory(self._directory)
        except OSError as error:
            raise as_error(error, f"snapshot {snapshot_id} can't be made in {self._directory}") from None
        return self.get(snapshot_id)

    def drop(self, snapshot_id: str) -> None:
        """Remove what was begun. Idempotent; what can't be removed now is one of the `rests`."""
        shutil.rmtree(self._partial(snapshot_id), ignore_errors=True)

    def delete(self, snapshot_id: str) -> None:
        if not is_id(snapshot_id):
            return
        partial = self._partial(snapshot_id)
        shutil.rmtree(partial, ignore_errors=True)
        try:
            self._path(snapshot_id).rename(partial)  # from now on there is no such snapshot
            sync_directory(self._directory)
            shutil.rmtree(partial)
        except FileNotFoundError:
            return
        except OSError as error:
            raise as_error(error, f"snapshot {snapshot_id} can't be deleted") from None

    def rests(self) -> list[Path]:
        """Return the files that a killed daemon left of snapshots that were being taken or removed."""
        return [self._directory / name for name in self._names(_PARTIAL)]

    def _names(self, more: str = "") -> list[str]:
        try:
            names = sorted(os.listdir(self._directory))
        except FileNotFoundError:
            return []
        end = _SUFFIX + more
        return [name for name in names if name.endswith(end) and is_id(name.removesuffix(end))]

    def _path(self, snapshot_id: str) -> Path:
        if not is_id(snapshot_id):
            raise _no_snapshot(snapshot_id)
        return self._directory / f"{snapshot_id}{_SUFFIX}"

    def _partial(self, snapshot_id: str) -> Path:
        return self._directory / f"{snapshot_id}{_SUFFIX}{_PARTIAL}"


def _no_snapshot(snapshot_id: str) -> NotFound:
    return NotFound(f"there is no snapshot {snapshot_id[:80]!r} on this node")
