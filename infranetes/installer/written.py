# SPDX-License-Identifier: Apache-2.0
"""The small files that the installer makes on the node, outside of /opt/infranetes."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterable, Mapping, Sequence

from infranetes.installer import layout
from infranetes.installer.node import Files
from infranetes_common.concurrency import replace_file
from infranetes_common.errors import FailedPrecondition

_BEFORE = "before.json"
_SECRETS = (layout.CONFIGURATION, layout.METRICS_TOKEN)
_SECRET = 0o600
_PUBLIC = 0o644


class Written:
    """Writes and deletes them, each whole or not at all."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._before = files.path(f"{layout.HOME}/{_BEFORE}")

    def refuse_others(self, paths: Iterable[str], ours: Iterable[str]) -> None:
        """:raise FailedPrecondition: a file that is to be made is there, and not of our making."""
        for path in sorted(set(paths) - set(ours)):
            if os.path.lexists(self._files.path(path)):
                raise FailedPrecondition(
                    f"{path} is on this node already, and the installer did not make it: move it away, or "
                    "leave this node as it is"
                )

    def to_make(self, paths: Iterable[str], earlier: Sequence[str]) -> tuple[str, ...]:
        """Return the directories that have to be made for files, with those that were made before."""
        missing = [each for path in paths for each in self._files.missing_directories(path)]
        outside = [each for each in missing if each != layout.HOME]
        return tuple(dict.fromkeys([*earlier, *outside]))

    def has(self, files: Mapping[str, str]) -> bool:
        """Return whether all files are there with these texts."""
        return all(self._files.text(path) == text for path, text in files.items())

    def write(self, files: Mapping[str, str]) -> bool:
        """Write those that are not there with these texts; return whether there were any."""
        changed = False
        for path, text in files.items():
            if self._files.text(path) != text:
                for directory in self._files.missing_directories(path):
                    self._files.path(directory).mkdir(mode=0o755, exist_ok=True)
                mode = _SECRET if path in _SECRETS else _PUBLIC
                replace_file(self._files.path(path), text, mode)
                changed = True
        return changed

    def delete(self, paths: Iterable[str]) -> None:
        """Delete files; those that are gone are."""
        for path in paths:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                self._files.path(path).unlink()

    def remove_directories(self, made: Sequence[str]) -> None:
        """Remove directories that were made and that are empty, the inner ones first."""
        for path in reversed(made):
            try:
                self._files.path(path).rmdir()
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):
                    raise

    # ---- What they were before an upgrade

    def save_before(self, paths: Iterable[str]) -> None:
        """Keep what files are now, unless an upgrade that was interrupted has kept what they were."""
        if not self._before.exists():
            texts = {path: text for path in paths if (text := self._files.text(path)) is not None}
            replace_file(self._before, json.dumps(texts), _SECRET)

    def before(self) -> dict[str, str]:
        """Return what files were before the upgrade."""
        texts: dict[str, str] = json.loads(self._before.read_text())
        return texts

    def forget_before(self) -> None:
        """Delete what was kept."""
        self._before.unlink(missing_ok=True)
