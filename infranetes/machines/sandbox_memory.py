# SPDX-License-Identifier: Apache-2.0
"""What features remember of sandboxes while no daemon runs, beside the records: a small file for each."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Generic, TypeVar

import cattrs
from twisted.logger import Logger

from infranetes_common.concurrency import replace_file, run_in_thread
from infranetes_common.errors import ResourceExhausted
from infranetes_common.reactors import IReactor

T = TypeVar("T")

_SUFFIX = ".json"
_log = Logger()


class SandboxMemory(Generic[T]):
    """Small files, one for each sandbox that needs it, which only the daemon's user can read.

    :param directory: made when it is needed. :param kind: the class of the values, which cattrs writes."""

    def __init__(self, reactor: IReactor, directory: Path, kind: type[T]) -> None:
        self._reactor = reactor
        self._directory = directory
        self._kind = kind

    async def save(self, sandbox_id: str, facts: T) -> None:
        """Remember a sandbox's value. :raise ResourceExhausted: there is no room."""
        text = json.dumps(cattrs.unstructure(facts))

        def write() -> None:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(self._file(sandbox_id), text)

        try:
            await run_in_thread(self._reactor, write)
        except OSError as error:
            raise ResourceExhausted(f"{self._directory} can't be written: {error.strerror}") from None

    async def load(self, sandbox_id: str) -> T | None:
        """Return what was saved; None: nothing was, or it can't be read."""
        return await run_in_thread(self._reactor, self._thd_read, sandbox_id)

    async def load_all(self) -> dict[str, T]:
        """Return what can be read of all that was saved, by sandbox."""

        def read() -> dict[str, T]:
            ids = [path.stem for path in self._directory.glob(f"*{_SUFFIX}")]
            return {id: value for id in ids if (value := self._thd_read(id)) is not None}

        return await run_in_thread(self._reactor, read)

    async def forget(self, sandbox_id: str) -> None:
        """Forget a sandbox's value. Idempotent."""

        def remove() -> None:
            with contextlib.suppress(OSError):
                self._file(sandbox_id).unlink(missing_ok=True)

        await run_in_thread(self._reactor, remove)

    async def keep_only(self, sandbox_ids: Iterable[str]) -> None:
        """Forget the values of all other sandboxes."""
        names = {f"{id}{_SUFFIX}" for id in sandbox_ids}

        def remove() -> None:
            for path in self._directory.glob("*"):
                if path.name not in names:
                    with contextlib.suppress(OSError):
                        path.unlink()

        await run_in_thread(self._reactor, remove)

    def _thd_read(self, sandbox_id: str) -> T | None:
        try:
            return cattrs.structure(json.loads(self._file(sandbox_id).read_text()), self._kind)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, cattrs.errors.BaseValidationError) as error:
            _log.error("what is remembered of sandbox {sandbox} can't be read: {error}",
                       sandbox=sandbox_id, error=str(error))  # fmt: skip
            return None

    def _file(self, sandbox_id: str) -> Path:
        return self._directory / f"{sandbox_id}{_SUFFIX}"
