# SPDX-License-Identifier: Apache-2.0
"""The node's own catalogue of machines' images: files by URL, and files of the node, as it is configured.

    qemu.infranetes.io/NAME:VERSION         the image of the table [machine_images."NAME:VERSION"]
    qemu.infranetes.io/NAME@sha256:...      the same, if its file has that digest

A pull brings the disk to the node: it is downloaded, or copied, and inspected as any other.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, TypeVarTuple

from twisted.internet.defer import CancelledError
from twisted.logger import Logger
from zope.interface import implementer

from infranetes.images import reference as references
from infranetes.images.config import ImagesConfig
from infranetes.images.disks import end_flights
from infranetes.images.interface import CatalogueImage, IKeepsImages
from infranetes.images.machine.bases import Bases
from infranetes.images.machine.config import MachineImageConfig
from infranetes.images.machine.disk import BaseDisk
from infranetes.images.machine.limits import DiskLimits, limits_of
from infranetes.images.machine.workshop import DiskSource, Workshop
from infranetes.images.reference import Reference
from infranetes_common.concurrency import IMAGES, Flight, deferred, run_in_thread
from infranetes_common.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    Unavailable,
)
from infranetes_common.reactors import IReactor

if TYPE_CHECKING:
    from twisted.internet._sslverify import IOpenSSLTrustRoot

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_SAY_SECONDS = 10.0  # between two lines about one download
_MOST_LISTED = 20  # images that a message names
_log = Logger()


@implementer(IKeepsImages)
class MachineCatalogue:
    """See `IKeepsImages`.

    :param directory: used by this object alone. :param images: the configured ones, by NAME:VERSION.
    :param name: the provider that boots them. :param trust: the CAs of servers; None: the machine's.
    """

    machine_images = True

    def __init__(
        self,
        reactor: IReactor,
        directory: Path,
        images: Mapping[str, MachineImageConfig],
        config: ImagesConfig | None = None,
        *,
        qemu_img: str = "qemu-img",
        name: str = "qemu",
        trust: IOpenSSLTrustRoot | None = None,
    ) -> None:
        self.name = name
        self._reactor = reactor
        self._images = dict(images)
        self._config = config or ImagesConfig()
        self._bases = Bases(reactor, directory)
        architecture = self._config.effective_platform.partition("/")[2]
        self._workshop = Workshop(reactor, self._limits, qemu_img, architecture)
        self._trust = trust
        self._flights: dict[str, Flight[CatalogueImage]] = {}  # pulls under way, by NAME:VERSION
        self._fresh: set[str] = set()  # ids that were found, and that nobody has recorded yet
        self._stopped = False

    @property
    def domain(self) -> str:
        """The domain of references to these images."""
        return f"{self.name}.infranetes.io"

    def reconfigure(self, images: Mapping[str, MachineImageConfig], config: ImagesConfig) -> None:
        """Find these images from now on, by `config`. Pulls under way end as they began."""
        self._images = dict(images)
        self._config = config

    @deferred
    async def start(self) -> None:
        await self._bases.start()

    @deferred
    async def stop(self) -> None:
        self._stopped = True
        await end_flights(self._flights.values())

    @deferred
    async def keep(self, ids: Collection[str]) -> None:
        self._fresh -= set(ids)
        await self._bases.sweep({*ids, *self._fresh})

    def canonical(self, reference: str) -> str:
        try:
            return f"{self.domain}/{_key(self._parsed(reference))}"
        except InvalidArgument:
            return reference

    @deferred
    async def present(self, image: CatalogueImage) -> bool:
        return await self._bases.get(image.id) is not None

    @deferred
    async def find(self, reference: str, annotations: Mapping[str, str]) -> CatalogueImage:
        asked = self._parsed(reference)
        if self._stopped:
            raise Unavailable("the daemon is stopping")
        key = self._key_of(asked)
        flight = self._flights.get(key)
        if flight is None or flight.done:
            flight = self._flights[key] = Flight(self._brought(key, self._images[key]))
        try:
            image = await flight.join()
        except CancelledError:
            if flight.done:  # by `stop`
                raise Unavailable("the daemon is stopping") from None
            if not flight.waiters:
                await end_flights([flight])
            raise
        finally:
            if flight.done and self._flights.get(key) is flight:
                del self._flights[key]
        if asked.digest not in ("", image.id):
            raise NotFound(f"image {reference[:300]!r} is not there: {key} is {image.id}")
        return image

    async def base(self, image_id: str) -> BaseDisk:
        """Return the disk of an image that was pulled.

        :raise NotFound: it is not on this node any more; it has to be pulled again.
        """
        base = await self._bases.get(image_id)
        if base is None:
            raise NotFound(f"the disk of image {image_id} is not on this node any more; pull it again")
        return base

    async def _brought(self, key: str, entry: MachineImageConfig) -> CatalogueImage:
        """Return an image whose disk is on the node; bring it if it is not."""
        what = f"{self.domain}/{key}"
        source = f"{entry.url}" if entry.url else await self._thread(_thd_state, entry.path, what)
        known = _id(entry, entry.digest) if entry.digest else self._bases.made_of(_mark(entry, source))
        base = await self._bases.get(known) if known else None
        if base is None:
            began = self._reactor.seconds()
            known, base = await self._make(entry, source, what)
            _log.info(
                "brought image {image} in {seconds:.2f} s",
                image=what,
                seconds=self._reactor.seconds() - began,
            )
        self._fresh.add(known)
        size = await self._thread(os.path.getsize, base.path)
        digests = (f"{self.domain}/{key.partition(':')[0]}@{known}",)
        return CatalogueImage(id=known, names=(what,), digests=digests, size=size, machine=known)

    async def _make(self, entry: MachineImageConfig, source: str, what: str) -> tuple[str, BaseDisk]:
        until = self._reactor.seconds()

        def progress(words: str) -> None:
            nonlocal until
            if self._reactor.seconds() >= until:
                until = self._reactor.seconds() + _SAY_SECONDS
                _log.info("{words}", words=words)

        fetched, made = self._bases.new(), self._bases.new()
        try:
            if entry.url:
                from infranetes.images.machine.download import Downloads, Wanted  # late: with it comes HTTP

                config = self._config
                downloads = Downloads(self._reactor, config.stall_seconds, config.attempts, self._trust)
                wanted = Wanted(entry.url, entry.digest, config.max_layer_bytes, what)
                await downloads.fetch(wanted, fetched, progress)
                disk = DiskSource(file=fetched, lent=True, digest=entry.digest, format=entry.said)
            else:
                disk = DiskSource(file=Path(entry.path), format=entry.said)
            answer = await self._workshop.make(disk, made, what, progress)
        finally:
            await self._thread(fetched.unlink, True)
        if entry.digest and answer.digest != entry.digest:
            await self._thread(made.unlink, True)
            raise FailedPrecondition(
                f"image {what}: {entry.path} is {answer.digest}, not the file with the sha256 of the "
                "configuration; find out which of them is right"
            )
        id = _id(entry, answer.digest)
        self._fresh.add(id)
        return id, await self._bases.keep(id, made, answer, entry.agent, _mark(entry, source))

    def _parsed(self, reference: str) -> Reference:
        """Return a reference with this catalogue's domain. :raise InvalidArgument: it is none."""
        if not reference.startswith(f"{self.domain}/"):
            raise InvalidArgument(
                f"image {reference[:300]!r} is none of this node's own; write {self.domain}/NAME:VERSION"
            )
        return references.parse(reference)

    def _key_of(self, asked: Reference) -> str:
        """Return the NAME:VERSION that a reference means. :raise NotFound: nothing is configured so."""
        if not asked.digest and _key(asked) in self._images:
            return _key(asked)
        for certain in (True, False):  # a file of the node has a digest once it was read
            for key, entry in self._images.items():
                its = _id(entry, entry.digest)
                if asked.digest and key.partition(":")[0] == asked.path and its == certain * asked.digest:
                    return key
        listed = ", ".join(sorted(self._images)[:_MOST_LISTED]) or "none"
        raise NotFound(f"image {asked} is not configured on this node (machine_images); there is {listed}")

    def _limits(self) -> DiskLimits:
        return limits_of(self._config)

    async def _thread(self, work: Callable[[*Ts], T], *args: *Ts) -> T:
        return await run_in_thread(self._reactor, work, *args, purpose=IMAGES)


def _key(asked: Reference) -> str:
    return f"{asked.path}:{asked.tag}"


def _id(entry: MachineImageConfig, digest: str) -> str:
    """Return an image's id: the digest of its file, and another one if it is read in another way."""
    if not entry.format and not entry.agent:
        return digest
    facts = f"{digest}\0{entry.format}\0{entry.agent}"
    return "sha256:" + hashlib.sha256(facts.encode()).hexdigest() if digest else ""


def _mark(entry: MachineImageConfig, source: str) -> str:
    return f"{source} {entry.format} {entry.agent}"


def _thd_state(path: str, what: str) -> str:
    """Return what tells a file of the node from what it was before.

    :raise FailedPrecondition: it is not there, or no file.
    """
    try:
        status = os.stat(path)
    except OSError as error:
        missing = error.errno in (errno.ENOENT, errno.ENOTDIR)
        kind = "is not there" if missing else f"can't be read: {error.strerror}"
        raise FailedPrecondition(f"image {what}: {path}, which the configuration lends, {kind}") from None
    if not stat.S_ISREG(status.st_mode):
        raise FailedPrecondition(f"image {what}: {path}, which the configuration lends, is no file")
    return (
        f"{path} {status.st_dev}:{status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"
    )
