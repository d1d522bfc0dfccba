# SPDX-License-Identifier: Apache-2.0
"""The bases of a node: disks out of images, each made once, that VMs boot copies of.

On disk, under one directory of mode 0700::

    bases.json      which image has which base; replaced whole
    HEX.FORMAT      a base: read-only, and never written to again
    new/ID          one that is being made; removed when the daemon starts

A file counts once it is in the index. It goes when no image that has it is there any more, or in use. A VM
that has it open keeps it.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TypeVar, TypeVarTuple

import attrs
import cattrs
from twisted.internet.defer import DeferredLock
from twisted.logger import Logger

from infranetes.images.machine.disk import BaseDisk, DiskFormat
from infranetes.images.machine.orders import Answer
from infranetes_common.concurrency import IMAGES, replace_file, run_in_thread
from infranetes_common.errors import ConfigError, FailedPrecondition, ResourceExhausted
from infranetes_common.reactors import IReactor

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

VERSION = 1
_INDEX, _NEW = "bases.json", "new"


@attrs.frozen
class _Base:
    """A base as it was when it was made: by inode, size and time of the last change of its content."""

    digest: str
    format: str
    virtual_size: int
    bios: bool
    uefi: bool
    inode: int
    size: int
    mtime_nanos: int

    @property
    def name(self) -> str:
        return f"{self.digest.removeprefix('sha256:')}.{self.format}"

    def is_at(self, path: Path) -> bool:
        """Whether the file is there and unchanged."""
        try:
            status = path.lstat()
        except FileNotFoundError:
            return False
        return (status.st_ino, status.st_size, status.st_mtime_ns) == (
            self.inode,
            self.size,
            self.mtime_nanos,
        )


@attrs.frozen
class _Had:
    """An image's base.

    :ivar base: its file's name. :ivar agent: the image says that our agent is in it.
    :ivar source: what it was made of, if that is no image of a registry; "": that is not told."""

    base: str
    agent: bool
    source: str = ""


@attrs.frozen
class _Index:
    """The file's content."""

    bases: Mapping[str, _Base] = attrs.field(factory=dict)  # by name
    images: Mapping[str, _Had] = attrs.field(factory=dict)  # by image id

    def text(self) -> str:
        bases = [attrs.asdict(base) for base in self.bases.values()]
        images = {id: attrs.asdict(had) for id, had in self.images.items()}
        return json.dumps({"version": VERSION, "bases": bases, "images": images}, indent=1)

    def of(self, images: Mapping[str, _Had]) -> _Index:
        """Return the part that these images need."""
        needed = {had.base for had in images.values()}
        return _Index({name: base for name, base in self.bases.items() if name in needed}, images)


class Bases:
    """The bases of one source of images. Call `start` first.

    :param directory: used by this object alone.
    """

    _log = Logger()

    def __init__(self, reactor: IReactor, directory: Path) -> None:
        self._reactor = reactor
        self._directory = directory
        self._index = _Index()
        self._lock = DeferredLock()  # one change of the index at a time

    async def start(self) -> None:
        """Read the index, and remove what belongs to no base. :raise ConfigError: they can't be kept."""
        try:
            self._index = await self._thread(self._thd_start)
        except OSError as e:
            raise ConfigError(
                f"state_dir: machines' disks can't be kept in {self._directory}: {e.strerror}"
            ) from None

    async def get(self, image_id: str) -> BaseDisk | None:
        """Return an image's base, if it has been made and is as it was."""
        had = self._index.images.get(image_id)
        base = self._index.bases.get(had.base) if had else None
        if had is None or base is None:
            return None
        path = self._directory / base.name
        if not await self._thread(base.is_at, path):
            self._log.warn("{path} has changed on the disk; it is made again", path=str(path))
            return None
        return self._disk(base, had.agent)

    def new(self) -> Path:
        """Return a path for a file that is to be a base."""
        return self._directory / _NEW / secrets.token_hex(8)

    def made_of(self, source: str) -> str:
        """Return the id of the image that was made of this; "": none was."""
        return next((id for id, had in self._index.images.items() if had.source == source), "")

    async def keep(
        self, image_id: str, made: Path, answer: Answer, agent: bool, source: str = ""
    ) -> BaseDisk:
        """Make a file a base, which is then an image's; a base of the same content counts instead.

        :param source: by which `made_of` finds it.
        :raise ResourceExhausted: the disk is full; the file is gone.
        """
        async with self._lock:
            try:
                return await self._keep(image_id, made, answer, agent, source)
            except OSError as e:
                raise full(e, self._directory) from None
            finally:
                await self._thread(made.unlink, True)

    async def sweep(self, ids: Collection[str]) -> None:
        """Remove the bases of other images than these. It does not fail."""
        async with self._lock:
            images = {id: had for id, had in self._index.images.items() if id in ids}
            if len(images) == len(self._index.images):
                return
            await self._change(self._index.of(images))

    async def _keep(self, image_id: str, made: Path, answer: Answer, agent: bool, source: str) -> BaseDisk:
        status = await self._thread(made.lstat)
        base = _Base(
            answer.digest, answer.format, answer.virtual_size, answer.bios, answer.uefi,
            status.st_ino, status.st_size, status.st_mtime_ns,
        )  # fmt: skip
        present = self._index.bases.get(base.name)
        path = self._directory / base.name
        if present is not None and await self._thread(present.is_at, path):
            base = present
        else:
            await self._thread(os.replace, made, path)
        had = _Had(base.name, agent, source)
        changed = _Index({**self._index.bases, base.name: base}, {**self._index.images, image_id: had})
        try:
            await self._save(changed.of(changed.images))
        except OSError:
            if base is not present:
                await self._thread(path.unlink, True)
            raise
        return self._disk(base, agent)

    async def _change(self, index: _Index) -> None:
        """Keep no more than what is in `index`. If the disk is too full to write it, files go first."""
        gone = [self._directory / name for name in self._index.bases if name not in index.bases]
        try:
            await self._save(index)
        except OSError as e:
            self._log.warn(
                "{path} can't be written yet: {error}", path=str(self._directory / _INDEX), error=e
            )
            self._index = index
        await self._thread(_thd_remove, gone)

    async def _save(self, index: _Index) -> None:
        await self._thread(replace_file, self._directory / _INDEX, index.text())
        self._index = index

    def _disk(self, base: _Base, agent: bool) -> BaseDisk:
        return BaseDisk(
            digest=base.digest,
            path=self._directory / base.name,
            format=DiskFormat(base.format),
            virtual_size=base.virtual_size,
            boots_by_bios=base.bios,
            boots_by_uefi=base.uefi,
            has_agent=agent,
        )

    def _thd_start(self) -> _Index:
        shutil.rmtree(self._directory / _NEW, ignore_errors=True)
        (self._directory / _NEW).mkdir(mode=0o700, parents=True)
        self._directory.chmod(0o700)
        index = self._thd_load()
        whole = {name: base for name, base in index.bases.items() if base.is_at(self._directory / name)}
        usable = _Index(whole, {id: had for id, had in index.images.items() if had.base in whole})
        _thd_remove(
            path
            for path in [*self._directory.iterdir()]
            if path.name not in (_INDEX, _NEW) and path.name not in usable.of(usable.images).bases
        )
        return usable.of(usable.images)

    def _thd_load(self) -> _Index:
        path = self._directory / _INDEX
        try:
            document = json.loads(path.read_bytes())
            if document["version"] != VERSION:
                raise ValueError("it is of another version")
            bases = cattrs.structure(document["bases"], list[_Base])
            images = cattrs.structure(document["images"], dict[str, _Had])
            return _Index({base.name: base for base in bases}, images)
        except FileNotFoundError:
            return _Index()
        except Exception as error:  # whatever is wrong with it, disks can be made again
            self._log.error("{path} can't be used: {error}", path=str(path), error=error)
            return _Index()

    async def _thread(self, work: Callable[[*Ts], T], *args: *Ts) -> T:
        return await run_in_thread(self._reactor, work, *args, purpose=IMAGES)


def full(error: OSError, directory: Path) -> Exception:
    """Return the error for a disk that has no room, or can't be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ResourceExhausted(
            f"the disk of {directory} is full; remove images or make room, then call again"
        )
    return FailedPrecondition(f"{directory} can't be used: {error.strerror}")


def _thd_remove(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
