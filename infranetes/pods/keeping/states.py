# SPDX-License-Identifier: Apache-2.0
"""The kept states of this node: pods' VMs as they ran, from which new pods' VMs start.

A state's stages:

    Stage      what is true                                   on the disk                     goes to
    KEEPING    the pod is held still, its VM's files are      states/ID/vm, held/SANDBOX      PREPARING (gone)
               being written
    PREPARING  the pod goes on; the files become what VMs     states/ID/vm                    READY (gone)
               start from
    READY      new pods may start from it                     the same, states/ID/state.json  REMOVED
    REMOVED    no pod starts from it any more                 states/ID/vm, or a part of it   (gone)

The record, state.json, is the last file to come and the first to go, so a state is whole or is none. A daemon
that starts removes every directory without one, and those of other formats.

A pod that is kept has a mark, held/SANDBOX, from before it is held until it has gone on: a daemon that finds
one has the pod go on as soon as its agent is heard.

Names are those of the pod's namespace. States of one name have different templates: those of one Deployment,
say, before and after an update. The files have whatever the pod had in its memory: only root can read them.
"""

from __future__ import annotations

import enum
import errno
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import attrs
from twisted.logger import Logger

from infranetes.pods.keeping.shape import Shape
from infranetes_common.concurrency import (
    KEEPING,
    deferred,
    replace_file,
    run_in_thread,
    shielded,
    sync_directory,
)
from infranetes_common.errors import (
    AlreadyExists,
    FailedPrecondition,
    InfranetesError,
    NotFound,
    ResourceExhausted,
)
from infranetes_common.reactors import IReactor

FORMAT = 1  # raised whenever a reader of the one before would misread it
MOST_RECORD = 4 << 20  # bytes of a record
_RECORD = "state.json"
_FILES = "vm"

_log = Logger()


class Stage(enum.Enum):
    """See the table above."""

    KEEPING = "being kept"
    PREPARING = "being prepared"
    READY = "ready"
    REMOVED = "removed"


@attrs.frozen
class KeptContainer:
    """A container that ran when its pod was kept.

    :ivar id: in that pod. :ivar volumes: the ids of its volumes there, by where they are mounted in it.
    """

    id: str
    name: str
    image: str
    shape: Shape
    volumes: Mapping[str, str]


@attrs.frozen
class KeptState:
    """A kept state.

    :ivar pod: the pod that was kept, for people. :ivar template: see `shape.template_of`.
    :ivar provider: the name of the node provider of its VM. :ivar sandbox: the shape of the pod.
    :ivar secrets: whether it was kept with what it had in its volumes in memory.
    :ivar kept_at: seconds since 1970 UTC. :ivar pause_seconds: for which the VM did not execute.
    :ivar size: bytes on the disk, once it is READY.
    """

    id: str
    namespace: str
    name: str
    pod: str
    template: str
    provider: str
    sandbox: Shape
    containers: tuple[KeptContainer, ...]
    secrets: bool = False
    machine: Mapping[str, str] = attrs.field(factory=dict)
    kept_at: float = 0.0
    pause_seconds: float = 0.0
    size: int = 0
    stage: Stage = Stage.KEEPING

    @property
    def called(self) -> str:
        """Its namespace and name, for people."""
        return f"{self.namespace}/{self.name}"

    def same_containers(self, other: KeptState) -> bool:
        """Whether the other one is of a pod whose containers are the same."""
        mine, theirs = ({each.name: each.shape for each in one.containers} for one in (self, other))
        return mine == theirs and self.sandbox == other.sandbox


class KeptStates:
    """The kept states of this node. :param directory: where they are.

    :ivar held: the sandboxes with a mark."""

    def __init__(self, reactor: IReactor, directory: Path) -> None:
        self._reactor = reactor
        self._states_dir = directory / "states"
        self._held_dir = directory / "held"
        self._states: dict[str, KeptState] = {}
        self._used: dict[str, float] = {}
        self.held: set[str] = set()

    def __iter__(self) -> Iterator[KeptState]:
        return iter(sorted(self._states.values(), key=lambda state: (state.called, -state.kept_at)))

    @deferred
    async def load(self) -> None:
        """Load the records, and remove what a killed daemon has left."""
        records, self.held = await run_in_thread(self._reactor, self._thd_load, purpose=KEEPING)
        self._states = {state.id: state for state, _ in records}
        self._used = {state.id: used for state, used in records}

    def files(self, id: str) -> Path:
        """Return the directory of a VM's files."""
        return self._states_dir / id / _FILES

    @property
    def size(self) -> int:
        """The bytes that all of them take on the disk."""
        return sum(state.size for state in self._states.values())

    def used_at(self, state: KeptState) -> float:
        """Return when a pod last started from it, or it was kept, in seconds since 1970 UTC."""
        return max(self._used.get(state.id, 0.0), state.kept_at)

    def named(self, namespace: str, name: str) -> list[KeptState]:
        """Return the states of this name, those that are READY first, the newest of them first."""
        its = [state for state in self if (state.namespace, state.name) == (namespace, name)]
        return sorted(its, key=lambda state: state.stage is not Stage.READY)

    def get(self, id: str) -> KeptState | None:
        """Return the state with this id; None: there is none any more."""
        return self._states.get(id)

    def _same(self, state: KeptState) -> list[KeptState]:
        """Return the others of a state's name and template."""
        its = self.named(state.namespace, state.name)
        return [other for other in its if other.template == state.template and other.id != state.id]

    # ---- a state's life

    async def begin(self, state: KeptState, *, replace: bool = False) -> None:
        """Make a state's empty directory.

        :param replace: `finish` removes the READY one of the same name and template.
        :raise AlreadyExists: there is such a state, or one is being made. :raise InfranetesError: no room."""
        for other in self._same(state):
            if other.stage is not Stage.READY:
                raise AlreadyExists(f"pod {other.pod} is being kept as {other.called} already: wait for that")
            if not replace:
                raise AlreadyExists(
                    f"there is a kept state {other.called} already, of pod {other.pod}: replace or remove "
                    "it, or give another name"
                )
        self._states[state.id] = state
        try:
            await run_in_thread(self._reactor, self._thd_begin, state.id, purpose=KEEPING)
        except BaseException:
            await shielded(self.remove(state.id))
            raise

    def note(self, state: KeptState) -> None:
        """Take note of another stage of a state that is not READY yet."""
        self._states[state.id] = state

    async def finish(self, state: KeptState) -> KeptState:
        """Make a state READY, and remove the one that it replaces.

        :raise InfranetesError: its record can't be written."""
        size = await run_in_thread(self._reactor, _thd_size, self.files(state.id), purpose=KEEPING)
        ready = attrs.evolve(state, stage=Stage.READY, size=size)
        await run_in_thread(self._reactor, self._thd_finish, ready, purpose=KEEPING)
        self._states[ready.id] = ready
        for other in self._same(ready):
            try:
                await self.remove(other.id)
            except InfranetesError as error:
                _log.warn("kept state {id} stays until the next start: {error}", id=other.id, error=error)
        return ready

    async def remove(self, id: str) -> None:
        """Remove a state in whatever stage. Idempotent. VMs that have started from it go on.

        :raise FailedPrecondition: its files can't be removed."""
        state = self._states.get(id)
        if state is not None:
            self._states[id] = attrs.evolve(state, stage=Stage.REMOVED)
        await run_in_thread(self._reactor, self._thd_remove, id, purpose=KEEPING)
        self._states.pop(id, None)
        self._used.pop(id, None)

    def find_to_remove(self, namespace: str, name: str) -> list[KeptState]:
        """Return the states that a name means, which are READY.

        :raise NotFound: there is none. :raise FailedPrecondition: one is not READY yet."""
        its = self.named(namespace, name)
        if not its:
            raise NotFound(f"there is no kept state {namespace}/{name}: `infranetes-ctl kept` lists them")
        if unready := [state for state in its if state.stage is not Stage.READY]:
            raise FailedPrecondition(
                f"kept state {namespace}/{name} is {unready[0].stage.value}: wait for it"
            )
        return its

    async def use(self, state: KeptState) -> None:
        """Note that a pod starts from a state now."""
        self._used[state.id] = self._reactor.seconds()
        await run_in_thread(self._reactor, _thd_touch, self._states_dir / state.id / _RECORD)

    # ---- marks

    async def mark(self, sandbox_id: str) -> None:
        """Note that a pod may be held still from now on. :raise InfranetesError: that can't be written."""
        await run_in_thread(self._reactor, self._thd_mark, sandbox_id)
        self.held.add(sandbox_id)

    async def unmark(self, sandbox_id: str) -> None:
        """Note that a pod has gone on, or is gone. Idempotent."""
        self.held.discard(sandbox_id)
        path = self._held_dir / sandbox_id
        await run_in_thread(self._reactor, lambda: path.unlink(missing_ok=True))

    # ---- files

    def _thd_load(self) -> tuple[list[tuple[KeptState, float]], set[str]]:
        records = []
        for directory in sorted(_listed(self._states_dir)):
            record = directory / _RECORD
            try:
                records.append((_read(record), record.stat().st_mtime))
                continue
            except FileNotFoundError:
                why = "a daemon was killed while it was made"
            except (OSError, ValueError, KeyError, TypeError) as error:
                why = f"its record can't be read: {error}"
            _log.info("kept state {id} is removed: {why}", id=directory.name, why=why)
            shutil.rmtree(directory, ignore_errors=True)
        return records, {path.name for path in _listed(self._held_dir)}

    def _thd_begin(self, id: str) -> None:
        with _as_own_errors(f"kept state {id} can't be made"):
            self._states_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            (self._states_dir / id).mkdir(mode=0o700)
            self.files(id).mkdir(mode=0o700)

    def _thd_finish(self, state: KeptState) -> None:
        with _as_own_errors(f"the record of kept state {state.id} can't be written"):
            replace_file(self._states_dir / state.id / _RECORD, json.dumps(_document(state), indent=1))

    def _thd_remove(self, id: str) -> None:
        directory = self._states_dir / id
        with _as_own_errors(f"kept state {id} can't be removed"):
            if directory.is_dir():
                (directory / _RECORD).unlink(missing_ok=True)
                sync_directory(directory)
                shutil.rmtree(directory)

    def _thd_mark(self, sandbox_id: str) -> None:
        with _as_own_errors(f"sandbox {sandbox_id} can't be marked as held"):
            self._held_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(self._held_dir / sandbox_id, b"")


def new_state_id() -> str:
    """Return the id of a new state."""
    return secrets.token_hex(8)


def _document(state: KeptState) -> dict[str, object]:
    fields = attrs.asdict(state, filter=lambda field, _: field.name != "stage")
    return {"format": FORMAT, **fields}


def _read(record: Path) -> KeptState:
    if record.stat().st_size > MOST_RECORD:
        raise ValueError(f"it has over {MOST_RECORD} bytes")
    fields = json.loads(record.read_bytes())
    if fields.pop("format") != FORMAT:
        raise ValueError("it is of another release")
    containers = tuple(KeptContainer(**each) for each in fields.pop("containers"))
    state = KeptState(containers=containers, stage=Stage.READY, **fields)
    if state.id != record.parent.name:
        raise ValueError("it is of another state")
    return state


def _listed(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except FileNotFoundError:
        return []


def _thd_size(directory: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in directory.rglob("*"))


def _thd_touch(path: Path) -> None:
    with suppress(FileNotFoundError):  # it was removed meanwhile
        os.utime(path)


@contextmanager
def _as_own_errors(what: str) -> Iterator[None]:
    """Raise errors of the operating system as InfranetesError. :param what: what has failed."""
    try:
        yield
    except OSError as error:
        raise _as_error(what, error) from None


def _as_error(what: str, error: OSError) -> InfranetesError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ResourceExhausted(f"{what}: {error.strerror}; make room in state_dir")
    return FailedPrecondition(f"{what}: {error.strerror}; see state_dir")
