# SPDX-License-Identifier: Apache-2.0
"""The disks in images of registries: taken out of them when VMs are to boot copies."""

from __future__ import annotations

from collections.abc import Mapping

from twisted.internet.defer import CancelledError
from twisted.logger import Logger

from infranetes.images.disks import end_flights
from infranetes.images.index import Image
from infranetes.images.machine.bases import Bases
from infranetes.images.machine.disk import BaseDisk
from infranetes.images.machine.limits import DiskLimits, limits_of
from infranetes.images.machine.workshop import DiskSource, Progress, Workshop
from infranetes.images.store import ImageStore
from infranetes_common import bounded_json
from infranetes_common.concurrency import Flight
from infranetes_common.errors import Unavailable
from infranetes_common.reactors import IReactor

AGENT_LABEL = "io.infranetes.agent"
"""A label of an image's configuration: `true` says that our agent is in it."""

_log = Logger()


def quiet(words: str) -> None:
    """Tell nobody of the progress."""


class RegistryDisks:
    """The disks in a store's images, which came from registries. Call `start` once the store has started.

    Whoever has a VM launched holds the image (`ImageStore.held`) from before it asks for the disk until the
    VM has it open: so the disk's file stays, even if the image is removed meanwhile.
    """

    def __init__(self, reactor: IReactor, store: ImageStore, qemu_img: str = "qemu-img") -> None:
        self._store = store
        self._bases = Bases(reactor, store.directory / "machines")
        architecture = store.settings.effective_platform.partition("/")[2]
        self._workshop = Workshop(reactor, self._limits, qemu_img, architecture)
        self._reactor = reactor
        self._flights: dict[str, Flight[BaseDisk]] = {}  # disks that are being made, by image id
        self._telling: dict[str, list[Progress]] = {}  # who wants to know how far they are
        self._stopped = False

    async def start(self) -> None:
        """Read which disks there are; remove what is unfinished. :raise ConfigError: they can't be kept."""
        await self._bases.start()
        self._store.sweep_beside(self._bases.sweep)
        await self._bases.sweep({image.id for image in self._store.list()})

    async def stop(self) -> None:
        """End what is under way. Idempotent."""
        self._stopped = True
        await end_flights(self._flights.values())

    async def base(self, image: Image, progress: Progress = quiet) -> BaseDisk:
        """Return an image's disk, and make it if it has not been made yet.

        Equal calls share the work, which goes on when they are cancelled: who comes again finds it.

        :param progress: is told, in words for people, how far it is.
        :raise NotFound: the image is not on this node any more.
        :raise FailedPrecondition: its disk can't be used: there is none, several, or one that is corrupt, not
            whole, too large or for other machines; says which, and what to do.
        :raise ResourceExhausted: the node's disk is full.
        :raise DeadlineExceeded: making it took too long.
        :raise Unavailable: the daemon is stopping.
        """
        disk = await self._bases.get(image.id)
        if disk is not None:
            self._store.files(image.id)  # raises if the image was removed meanwhile, and its disk with it
            return disk
        if self._stopped:
            raise Unavailable("the daemon is stopping")
        flight = self._flights.get(image.id)
        if flight is None or flight.done:
            self._telling[image.id] = []
            flight = self._flights[image.id] = Flight(self._make(image))
        telling = self._telling[image.id]
        telling.append(progress)
        try:
            made = await flight.join()
        except CancelledError:
            if flight.done:  # by `stop`
                raise Unavailable("the daemon is stopping") from None
            raise
        finally:
            telling.remove(progress)
            if flight.done and self._flights.get(image.id) is flight:
                del self._flights[image.id], self._telling[image.id]
        self._store.files(image.id)
        return made

    async def _make(self, image: Image) -> BaseDisk:
        what = (image.repo_tags + image.repo_digests + (image.id,))[0]

        def progress(words: str) -> None:
            for each in self._telling[image.id]:
                each(words)

        began = self._reactor.seconds()
        async with self._store.held(image.id):
            files = self._store.files(image.id)
            agent = _has_agent(await self._store.config(image.id))
            if files.disk:
                source = DiskSource(file=files.layers[0].path, lent=True, digest=files.digest)
            else:
                source = DiskSource(layers=files.layers)
            made = self._bases.new()
            answer = await self._workshop.make(source, made, what, progress)
            base = await self._bases.keep(image.id, made, answer, agent)
        _log.info(
            "took the disk out of image {image}: {kind}, {size} bytes for its VMs, in {seconds:.2f} s",
            image=what,
            kind=base.format.value,
            size=base.virtual_size,
            seconds=self._reactor.seconds() - began,
        )
        return base

    def _limits(self) -> DiskLimits:
        return limits_of(self._store.settings)


def _has_agent(config: bytes) -> bool:
    """Whether an image's configuration says that our agent is in it."""
    try:
        document = bounded_json.loads(config)
    except ValueError:  # of an artifact, anything
        return False
    inner = document.get("config") if isinstance(document, Mapping) else None
    labels = inner.get("Labels") if isinstance(inner, Mapping) else None
    return isinstance(labels, Mapping) and labels.get(AGENT_LABEL) == "true"
