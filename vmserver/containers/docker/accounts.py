# SPDX-License-Identifier: Apache-2.0
"""The user and groups of a container's first process, from an image's /etc/passwd and /etc/group.

Docker reads these files itself, and adds the groups that a user is a member of unless the request names a
group beside the user. Where the CRI wants something else, the ids are resolved here: Docker takes numbers as
they are.
"""

from __future__ import annotations

import io
import posixpath
import tarfile

import attrs
from twisted.internet.defer import DeferredLock

from infranetes_common.errors import InvalidArgument
from infranetes_common.wire import cri
from vmserver.containers import accounts as shared
from vmserver.containers.accounts import MAX_FILE_BYTES, Accounts, check, user_field
from vmserver.containers.docker.api import Request
from vmserver.containers.docker.engine import Engine, EngineError
from vmserver.containers.docker.names import container_name

_MAX_LINKS = 8  # the most symbolic links that are followed
_MAX_IMAGES = 64  # the most images whose accounts are cached


@attrs.frozen
class DockerUser:
    """Docker's fields `User` and `GroupAdd`."""

    user: str
    groups: tuple[int, ...]


def configured(context: cri.LinuxContainerSecurityContext) -> DockerUser | None:
    """Return the configured user and groups, if Docker can resolve them itself; None if `resolve` has to.

    :raise InvalidArgument: something is malformed; names the field.
    """
    check(context)
    if context.HasField("run_as_group") or context.supplemental_groups_policy == cri.Strict:
        return None
    return DockerUser(user_field(context), tuple(context.supplemental_groups))


def resolve(context: cri.LinuxContainerSecurityContext, accounts: Accounts) -> DockerUser:
    """Return the user and groups as numbers, looked up in the image's accounts.

    :raise InvalidArgument: the image has no such user or group.
    """
    user = shared.resolve(context, accounts)
    return DockerUser(f"{user.uid}:{user.gid}", user.groups)


class ImageAccounts:
    """Reads the accounts of images, from a container that is created for this and never started."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._cache: dict[str, Accounts] = {}
        self._lock = DeferredLock()

    async def of(self, image_id: str) -> Accounts:
        """Return an image's accounts.

        :raise EngineError: there is no such image. :raise InvalidArgument: a file is too large."""
        async with self._lock:
            if image_id not in self._cache:
                while len(self._cache) >= _MAX_IMAGES:
                    del self._cache[next(iter(self._cache))]
                self._cache[image_id] = await self._read(image_id)
            return self._cache[image_id]

    async def _read(self, image_id: str) -> Accounts:
        name = container_name(f"accounts-{image_id.removeprefix('sha256:')[:32]}")
        user = (await self._engine.inspect_image(image_id))["Config"].get("User") or ""
        body: Request = {"Image": image_id, "Entrypoint": ["/"], "HostConfig": {"NetworkMode": "none"}}
        try:
            await self._engine.call("POST", "/containers/create", {"name": name}, body)
        except EngineError as error:
            if error.status != 409:  # a container that an earlier agent left serves as well
                raise
        try:
            passwd = await self._file(name, "/etc/passwd")
            return Accounts(passwd, await self._file(name, "/etc/group"), user)
        finally:
            await self._engine.call("DELETE", f"/containers/{name}", {"force": "1", "v": "1"})

    async def _file(self, name: str, path: str) -> bytes:
        """Return a file's content; links are followed within the image. Empty if there is no such file."""
        for _ in range(_MAX_LINKS):
            data = await self._archive(name, path)
            if not data:
                return b""
            with tarfile.open(fileobj=io.BytesIO(data)) as tar:
                member = tar.next()
                if member is not None and member.issym():
                    path = posixpath.join("/", posixpath.dirname(path), member.linkname)
                    continue
                file = tar.extractfile(member) if member is not None and member.isfile() else None
                return file.read() if file is not None else b""
        return b""

    async def _archive(self, name: str, path: str) -> bytes:
        try:
            stream = await self._engine.stream("GET", f"/containers/{name}/archive", {"path": path})
        except EngineError as error:
            if error.status == 404:
                return b""
            raise
        archive = b""
        try:
            while chunk := await stream.read():
                archive += chunk
                if len(archive) > MAX_FILE_BYTES:
                    raise InvalidArgument(f"the image's {path} has over {MAX_FILE_BYTES} bytes")
        finally:
            stream.close()
        return archive
