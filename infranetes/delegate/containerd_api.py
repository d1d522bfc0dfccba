# SPDX-License-Identifier: Apache-2.0
"""containerd's own services, beside the CRI on its socket: what an image's content is read with."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection
from contextlib import aclosing, asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypeVar

from google.protobuf.message import DecodeError, Message
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from infranetes.delegate.errors import as_error
from infranetes_common.errors import DataLoss, InfranetesError, Unavailable
from infranetes_common.wire import containerd
from txgrpc import GrpcError
from txgrpc.raw import RawStub

M = TypeVar("M", bound=Message)

NAMESPACE = "k8s.io"  # the containerd namespace in which its CRI keeps images
SECONDS = 30.0  # for a call with one answer
READ_SECONDS = 600.0  # for reading a whole blob
AGAIN = "remove the image with crictl rmi, and pull it again"
LEASE = timedelta(hours=1)  # after which the lease of a killed daemon expires

_METADATA = (("containerd-namespace", NAMESPACE),)
_SERVICES = "/containerd.services."
_GET = _SERVICES + "images.v1.Images/Get"
_INFO = _SERVICES + "content.v1.Content/Info"
_READ = _SERVICES + "content.v1.Content/Read"
_CREATE_LEASE = _SERVICES + "leases.v1.Leases/Create"
_ADD_RESOURCE = _SERVICES + "leases.v1.Leases/AddResource"
_DELETE_LEASE = _SERVICES + "leases.v1.Leases/Delete"
_PLUGINS = _SERVICES + "introspection.v1.Introspection/Plugins"

_log = Logger()


class ContainerdApi:
    """Calls of containerd. Each fails with an `InfranetesError` that has containerd's code and words.

    :param stub: for calls on its socket.
    """

    def __init__(self, reactor: IReactorTime, stub: RawStub) -> None:
        self._reactor = reactor
        self._stub = stub

    async def target(self, name: str) -> str:
        """Return the digest of an image's manifest, or of its index.

        :param name: a reference, or an id: the CRI names its images by both.
        :raise NotFound: there is no such image.
        """
        request = containerd.GetImageRequest(name=name)
        return (await self._call(_GET, request, containerd.GetImageResponse)).image.target.digest

    async def size(self, digest: str) -> int:
        """Return how many bytes a blob has. :raise NotFound: it is not there."""
        request = containerd.InfoRequest(digest=digest)
        return (await self._call(_INFO, request, containerd.InfoResponse)).info.size

    async def read(self, digest: str, limit: int) -> bytes:
        """Return a small blob.

        :raise NotFound: it is not there. :raise DataLoss: it is not the digest's, or has over `limit` bytes.
        """
        parts: list[bytes] = []

        async def keep(part: bytes) -> None:
            parts.append(part)

        await self.download(digest, limit, keep)
        return b"".join(parts)

    async def download(self, digest: str, limit: int, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Read a blob, and have `write` take it part by part. Raises as `read` does."""
        summed, size = hashlib.sha256(), 0
        async with aclosing(self._parts(digest)) as parts:
            async for part in parts:
                size += len(part)
                if size > limit:
                    raise DataLoss(f"containerd's blob {digest} has over {limit} bytes")
                summed.update(part)
                await write(part)
        if digest != f"sha256:{summed.hexdigest()}":
            raise DataLoss(f"the content of containerd's blob {digest} has another digest; {AGAIN}")

    async def root(self) -> Path | None:
        """Return the directory in which blobs are files; None: containerd tells none."""
        request = containerd.PluginsRequest(filters=["type==io.containerd.content.v1"])
        for plugin in (await self._call(_PLUGINS, request, containerd.PluginsResponse)).plugins:
            if plugin.exports.get("root", "").startswith("/"):
                return Path(plugin.exports["root"])
        return None

    @asynccontextmanager
    async def leased(self, digests: Collection[str]) -> AsyncIterator[None]:
        """Keep blobs from being removed until the end of the block.

        :param digests: whether they are there is not looked at.
        """
        lease = f"infranetes-{secrets.token_hex(16)}"
        until = datetime.fromtimestamp(self._reactor.seconds(), UTC) + LEASE
        labels = {"containerd.io/gc.expire": until.isoformat(timespec="seconds")}
        request = containerd.CreateLeaseRequest(id=lease, labels=labels)
        await self._ask(_CREATE_LEASE, request)
        try:
            for digest in digests:
                resource = containerd.Resource(id=digest, type="content")
                adding = containerd.AddResourceRequest(id=lease, resource=resource)
                await self._ask(_ADD_RESOURCE, adding)
            yield
        finally:
            try:
                ending = containerd.DeleteLeaseRequest(id=lease)
                await self._ask(_DELETE_LEASE, ending)
            except InfranetesError as error:
                _log.info("lease {lease} stays until {until}: {error}",
                          lease=lease, until=labels["containerd.io/gc.expire"], error=error)  # fmt: skip

    async def _call(self, path: str, request: Message, response_class: type[M]) -> M:
        return _parsed(path, response_class, await self._ask(path, request))

    async def _ask(self, path: str, request: Message) -> bytes:
        payload = request.SerializeToString()
        try:
            return await self._stub.call(path, payload, timeout=SECONDS, metadata=_METADATA)
        except GrpcError as error:
            raise as_error("containerd", error) from None

    async def _parts(self, digest: str) -> AsyncGenerator[bytes, None]:
        payload = containerd.ReadContentRequest(digest=digest).SerializeToString()
        async with self._stub.stream(_READ, payload, timeout=READ_SECONDS, metadata=_METADATA) as answers:
            try:
                async for answer in answers:
                    yield _parsed(_READ, containerd.ReadContentResponse, answer).data
            except GrpcError as error:
                raise as_error("containerd", error) from None


def _parsed(path: str, response_class: type[M], payload: bytes) -> M:
    try:
        return response_class.FromString(payload)
    except DecodeError:
        raise Unavailable(f"containerd's answer to {path} can't be read") from None
