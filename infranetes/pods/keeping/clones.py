# SPDX-License-Identifier: Apache-2.0
"""Records of which sandbox started from which kept state.

They are in pods/SANDBOX.json, from before the VM is launched until it is destroyed, and outlive the states.
"""

from __future__ import annotations

import json
from pathlib import Path

import attrs
from twisted.logger import Logger

from infranetes.pods.keeping.states import KeptContainer
from infranetes_common.concurrency import replace_file, run_in_thread
from infranetes_common.errors import FailedPrecondition
from infranetes_common.reactors import IReactor

_log = Logger()


@attrs.frozen
class Clone:
    """What a sandbox's VM starts from.

    :ivar state: the kept state's id. :ivar called: its namespace and name, for people.
    :ivar containers: those that are in the VM, and that no container of the pod has taken the place of.
    """

    state: str
    called: str
    containers: tuple[KeptContainer, ...]

    def container(self, name: str) -> KeptContainer | None:
        """Return the kept container of this name; None: there is none any more."""
        return next((each for each in self.containers if each.name == name), None)

    def without(self, name: str) -> Clone:
        """Return it without a container."""
        return attrs.evolve(self, containers=tuple(each for each in self.containers if each.name != name))


class Clones:
    """What the VMs of sandboxes start from, by the sandboxes' ids. :param directory: of the records."""

    def __init__(self, reactor: IReactor, directory: Path) -> None:
        self._reactor = reactor
        self._directory = directory
        self._clones: dict[str, Clone] = {}

    async def load(self) -> None:
        """Load what an earlier daemon recorded."""
        self._clones = await run_in_thread(self._reactor, self._thd_load)

    def ids(self) -> list[str]:
        """Return the sandboxes' ids."""
        return list(self._clones)

    def get(self, sandbox_id: str) -> Clone | None:
        """Return what a sandbox's VM starts from; None: not from a kept state."""
        return self._clones.get(sandbox_id)

    async def put(self, sandbox_id: str, clone: Clone) -> None:
        """Record what a sandbox's VM starts from. :raise FailedPrecondition: it can't be written."""
        await run_in_thread(self._reactor, self._thd_put, sandbox_id, clone)
        self._clones[sandbox_id] = clone

    async def forget(self, sandbox_id: str) -> None:
        """Remove a sandbox's record. Idempotent."""
        if self._clones.pop(sandbox_id, None) is not None:
            path = self._path(sandbox_id)
            await run_in_thread(self._reactor, lambda: path.unlink(missing_ok=True))

    def _path(self, sandbox_id: str) -> Path:
        return self._directory / f"{sandbox_id}.json"

    def _thd_load(self) -> dict[str, Clone]:
        clones = {}
        for path in sorted(self._directory.glob("*.json")):
            try:
                fields = json.loads(path.read_bytes())
                containers = tuple(KeptContainer(**each) for each in fields.pop("containers"))
                clones[path.stem] = Clone(containers=containers, **fields)
            except (OSError, ValueError, KeyError, TypeError) as error:
                _log.error("what sandbox {id} started from can't be read: {error}", id=path.stem, error=error)
        return clones

    def _thd_put(self, sandbox_id: str, clone: Clone) -> None:
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(self._path(sandbox_id), json.dumps(attrs.asdict(clone)))
        except OSError as error:
            raise FailedPrecondition(
                f"what sandbox {sandbox_id} starts from can't be recorded: {error.strerror}; see state_dir"
            ) from None
