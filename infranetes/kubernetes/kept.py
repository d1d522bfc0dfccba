# SPDX-License-Identifier: Apache-2.0
"""Objects as the API server last showed them, kept in a file for a daemon that starts while it is away."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs
from twisted.internet.interfaces import IReactorThreads
from twisted.logger import Logger

from infranetes.kubernetes.watch import Packed
from infranetes_common.concurrency import replace_file, run_in_thread

MAX_BYTES = 256 * 1024 * 1024  # the most that is read
_FORMAT = 1

# The file's first line has its format, its cluster and the paths of the kinds that it has; each other line
# has an object and the path of its kind.

_log = Logger()


@attrs.frozen
class Kept:
    """The content of a file.

    :ivar objects: of each kind, by its path. :ivar age: seconds since the API server last confirmed them."""

    objects: Mapping[str, Packed]
    age: float


class KeptObjects:
    """A file of objects.

    :param path: the file; its directory is made when it is first needed."""

    def __init__(self, reactor: IReactorThreads, path: Path) -> None:
        self._reactor = reactor
        self._path = path

    async def load(self, cluster: str) -> Kept | None:
        """Read the file; None: there is none, it is another cluster's, or it can't be used."""
        return await run_in_thread(self._reactor, self._thd_load, cluster)

    async def save(self, cluster: str, objects: Mapping[str, Sequence[str]]) -> None:
        """Write the file anew. A failure is logged. :param objects: as JSON, by the path of their kind."""
        await run_in_thread(self._reactor, self._thd_save, cluster, objects)

    async def confirm(self) -> None:
        """Note that the file still has the present state."""
        await run_in_thread(self._reactor, self._thd_confirm)

    def _thd_load(self, cluster: str) -> Kept | None:
        try:
            with self._path.open("rb") as file:
                age = max(0.0, time.time() - os.fstat(file.fileno()).st_mtime)
                about = json.loads(file.readline(MAX_BYTES))
                if (about["format"], about["cluster"]) != (_FORMAT, cluster):
                    return None
                objects: dict[str, list[str]] = {path: [] for path in about["paths"]}
                while line := file.readline(MAX_BYTES - file.tell()):
                    entry = json.loads(line)
                    objects[entry["path"]].append(json.dumps(entry["object"]))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            _log.warn("{file} can't be used: {error}", file=str(self._path), error=error)
            return None
        return Kept({path: Packed(texts) for path, texts in objects.items()}, age)

    def _thd_save(self, cluster: str, objects: Mapping[str, Sequence[str]]) -> None:
        lines = [json.dumps({"format": _FORMAT, "cluster": cluster, "paths": [*objects]})]
        for path, texts in objects.items():
            start = f'{{"path": {json.dumps(path)}, "object": '
            lines += [f"{start}{text}}}" for text in texts]
        try:
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            replace_file(self._path, "\n".join([*lines, ""]))
        except OSError as error:
            _log.warn("{file} can't be written: {error}", file=str(self._path), error=error)

    def _thd_confirm(self) -> None:
        with contextlib.suppress(OSError):
            os.utime(self._path)
