# SPDX-License-Identifier: Apache-2.0
"""What has to be remembered of guests without our agent while no daemon runs: a small file for each."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path

import cattrs
from twisted.logger import Logger

from infranetes.machines.agentless.configuration import PodFacts
from infranetes_common.concurrency import replace_file, run_in_thread
from infranetes_common.errors import ResourceExhausted
from infranetes_common.reactors import IReactor

_log = Logger()


class GuestMemory:
    """The facts of guests' pods, each in a file that only the daemon's user can read.

    :param directory: made when it is needed."""

    def __init__(self, reactor: IReactor, directory: Path) -> None:
        self._reactor = reactor
        self._directory = directory

    async def save(self, facts: PodFacts) -> None:
        """Remember the facts of a sandbox's guest. :raise ResourceExhausted: there is no room."""
        text = json.dumps(cattrs.unstructure(facts))

        def write() -> None:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(self._file(facts.sandbox_id), text)

        try:
            await run_in_thread(self._reactor, write)
        except OSError as error:
            raise ResourceExhausted(f"{self._directory} can't be written: {error.strerror}") from None

    async def load(self, sandbox_id: str) -> PodFacts | None:
        """Return what was saved; None: nothing was, or it can't be read."""

        def read() -> PodFacts | None:
            try:
                return cattrs.structure(json.loads(self._file(sandbox_id).read_text()), PodFacts)
            except FileNotFoundError:
                return None
            except (OSError, ValueError, cattrs.errors.BaseValidationError) as error:
                _log.error("what is remembered of the guest of {sandbox} can't be read: {error}",
                           sandbox=sandbox_id, error=str(error))  # fmt: skip
                return None

        return await run_in_thread(self._reactor, read)

    async def forget(self, sandbox_id: str) -> None:
        """Forget a sandbox's guest. Idempotent."""

        def remove() -> None:
            with contextlib.suppress(OSError):
                self._file(sandbox_id).unlink(missing_ok=True)

        await run_in_thread(self._reactor, remove)

    async def keep_only(self, sandbox_ids: Iterable[str]) -> None:
        """Forget the guests of all other sandboxes."""
        names = {f"{id}.json" for id in sandbox_ids}

        def remove() -> None:
            for path in self._directory.glob("*"):
                if path.name not in names:
                    with contextlib.suppress(OSError):
                        path.unlink()

        await run_in_thread(self._reactor, remove)

    def _file(self, sandbox_id: str) -> Path:
        return self._directory / f"{sandbox_id}.json"
