# SPDX-License-Identifier: Apache-2.0
"""The pull of an image: from a reference to blobs that are checked to be one image."""

from __future__ import annotations

import os
import secrets
import shutil
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from itertools import islice
from pathlib import Path

import attrs
from twisted.logger import Logger

from infranetes.images import layers, manifest
from infranetes.images.auth import RegistryCredentials
from infranetes.images.blobs import STALL_SECONDS, thd_fetch
from infranetes.images.config import ImagesConfig
from infranetes.images.index import Record
from infranetes.images.manifest import Layer, Manifest
from infranetes.images.reference import Reference
from infranetes.images.skopeo import MixedMediaTypes, Skopeo
from infranetes_common.concurrency import IMAGES, backoff, run_in_thread, sleep
from infranetes_common.errors import FailedPrecondition, ResourceExhausted, Unavailable
from infranetes_common.reactors import IReactor

# The pause before the second attempt, which doubles before each further one, and the longest pause.
RETRY_SECONDS = (1.0, 300.0)
SLACK_BYTES = 1 << 20  # by how much a pull's files may exceed what the manifest says

#: Unpacked sizes by (layer digest, diff id) that were checked to belong together.
Verified = Mapping[tuple[str, str], int]
#: Protects blobs with these digests from removal from now on.
Use = Callable[[Iterable[str]], Awaitable[None]]


class Puller:
    """Fetches images into `blobs`; each pull's unfinished files have a directory of their own in `pulls`.

    Everything is checked before it counts: manifests and blobs against their digests, unpacked layers against
    the configuration. So an image id means the same content wherever it came from.
    """

    _log = Logger()

    def __init__(self, reactor: IReactor, config: ImagesConfig, blobs: Path, pulls: Path) -> None:
        self._reactor = reactor
        self._config = config
        self._blobs = blobs
        self._pulls = pulls
        self._skopeo = Skopeo(reactor, config)

    async def pull(
        self, requested: Reference, auth: RegistryCredentials | None, verified: Verified, use: Use
    ) -> Record:
        """Return the image with just the reference that was requested. Raises as `ImageStore.pull`."""
        work = self._pulls / secrets.token_hex(8)
        await run_in_thread(self._reactor, os.mkdir, work, 0o700)
        try:
            return await self._retried(requested, lambda: self._fetch(requested, auth, work, verified, use))
        finally:
            remove = partial(shutil.rmtree, work, ignore_errors=True)
            await run_in_thread(self._reactor, remove, purpose=IMAGES)

    async def _fetch(
        self, requested: Reference, auth: RegistryCredentials | None, work: Path, verified: Verified, use: Use
    ) -> Record:
        where = str(requested)
        top, reference = "", requested
        for _ in range(manifest.MAX_INDEX_DEPTH):
            data = await self._skopeo.manifest(reference, auth, str(work))
            digest = manifest.digest_of(data)
            if reference.digest not in ("", digest):
                raise Unavailable(f"image {reference}: the registry sent another manifest, {digest}")
            top = top or digest
            read = manifest.read(data, self._config.effective_platform, where, disks=True)
            if isinstance(read, Manifest):
                break
            reference = requested.at(read)
        else:
            raise FailedPrecondition(f"image {where}: its index points to another index, not to an image")
        await use(read.blobs)
        await run_in_thread(self._reactor, self._check_room, read)
        try:
            await self._skopeo.copy(
                requested.at(read.digest),
                auth,
                str(work),
                str(self._blobs.parent),
                lambda: run_in_thread(self._reactor, self._progress, work, read, where),
            )
        except MixedMediaTypes:
            await self._fetch_blobs(requested.at(read.digest), auth, work, read)
        return await self._examine(read, requested, requested.at(top), verified)

    async def _fetch_blobs(
        self, image: Reference, auth: RegistryCredentials | None, work: Path, read: Manifest
    ) -> None:
        """Fetch what skopeo, which has applied the policy, does not: the manifest has mixed media types."""
        origin = await self._skopeo.origin(image, auth, str(work))
        for digest, size in read.blobs.items():
            target = self._blob(digest)
            if not target.exists():
                stop = threading.Event()
                seconds = min(self._config.stall_seconds, STALL_SECONDS)
                arguments = (origin, digest, size, work, target, seconds, stop)
                await run_in_thread(self._reactor, thd_fetch, *arguments, on_cancel=stop.set, purpose=IMAGES)

    async def _examine(self, read: Manifest, asked: Reference, top: Reference, verified: Verified) -> Record:
        """Check that what was fetched is one image whose parts belong together."""
        where = str(asked)
        for digest, size in read.blobs.items():
            path = self._blob(digest)
            if not path.is_file() or path.stat().st_size != size:
                raise FailedPrecondition(f"image {where}: {digest} does not have the {size} bytes it should")
        data = await run_in_thread(self._reactor, self._blob(read.config_digest).read_bytes)
        if manifest.digest_of(data) != read.config_digest:
            raise Unavailable(f"image {where}: its configuration is not the one its manifest names")
        tags = frozenset() if asked.digest else frozenset([str(asked)])
        digests = frozenset([str(top)])
        if read.disk:
            disk_config = manifest.read_disk_config(data)
            manifest.require_platform(disk_config, self._config.effective_platform, where)
            return Record(read, (), (), "", tags, digests)
        config = manifest.read_config(data, read, where)
        manifest.require_platform(config, self._config.effective_platform, where)
        read = attrs.evolve(read, layers=await run_in_thread(self._reactor, self._thd_as_they_are, read))
        sizes = dict(verified)
        unpacked = []
        for layer, diff_id in zip(read.layers, config.diff_ids, strict=True):
            if (layer.digest, diff_id) not in sizes:
                stop = threading.Event()
                arguments = (self._blob(layer.digest), layer.compression, self._config.max_layer_bytes, stop)
                unpacked_digest, size = await run_in_thread(
                    self._reactor, layers.measure, *arguments, on_cancel=stop.set, purpose=IMAGES
                )
                if unpacked_digest != diff_id:
                    raise FailedPrecondition(
                        f"image {where}: layer {layer.digest} unpacks to {unpacked_digest}, "
                        f"its configuration says {diff_id}"
                    )
                sizes[layer.digest, diff_id] = size
            unpacked.append(sizes[layer.digest, diff_id])
        return Record(read, config.diff_ids, tuple(unpacked), config.user, tags, digests)

    def _thd_as_they_are(self, read: Manifest) -> tuple[Layer, ...]:
        """Return the layers with the compression that their files have, whatever the manifest says."""
        return tuple(
            attrs.evolve(
                layer, compression=layers.compression_of(self._blob(layer.digest), layer.compression)
            )
            for layer in read.layers
        )

    async def _retried(self, asked: Reference, attempt: Callable[[], Awaitable[Record]]) -> Record:
        pauses = islice(backoff(*RETRY_SECONDS), self._config.attempts - 1)
        for pause in pauses:
            try:
                return await attempt()
            except Unavailable as error:
                self._log.warn(
                    "pulling {image} again in {seconds} s: {error}",
                    image=str(asked),
                    seconds=pause,
                    error=str(error),
                )
                await sleep(self._reactor, pause)
        return await attempt()

    def _check_room(self, image: Manifest) -> None:
        """Refuse before the disk is full rather than after."""
        missing = sum(s for d, s in image.blobs.items() if not self._blob(d).exists())
        stat = os.statvfs(self._blobs)
        if missing > stat.f_bavail * stat.f_frsize:
            raise ResourceExhausted(
                f"{self._blobs} has {stat.f_bavail * stat.f_frsize} bytes free, "
                f"the image needs {missing}; remove images or make room"
            )

    def _progress(self, work: Path, image: Manifest, where: str) -> int:
        """Return how many bytes have come so far.

        :raise FailedPrecondition: they are more than the manifest says.
        """
        here = sum(size for digest, size in image.blobs.items() if self._blob(digest).exists())
        for parent, _, files in os.walk(work):
            for name in files:
                try:
                    here += os.lstat(os.path.join(parent, name)).st_size
                except FileNotFoundError:
                    continue
        if here > sum(image.blobs.values()) + SLACK_BYTES:
            raise FailedPrecondition(f"image {where}: the registry sends more than its manifest says")
        return here

    def _blob(self, digest: str) -> Path:
        return self._blobs / digest.removeprefix("sha256:")
