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
from vmserver.containers.docker.api import Request
from vmserver.containers.docker.engine import Engine, EngineError
from vmserver.containers.docker.names import container_name

MAX_FILE_BYTES = 1024 * 1024
MAX_ID = 2**31 - 1
_MAX_LINKS = 8  # symbolic links that are followed
_MAX_IMAGES = 64  # whose accounts are cached


@attrs.frozen
class Accounts:
    """The two files of an image (empty where it has none) and the user in its configuration."""

    passwd: bytes = b""
    group: bytes = b""
    user: str = ""


@attrs.frozen
class Identity:
    """Docker's fields `User` and `GroupAdd`."""

    user: str
    groups: tuple[int, ...]


def configured(context: cri.LinuxContainerSecurityContext) -> Identity | None:
    """Return the configured user and groups, if Docker can resolve them itself; None if `resolve` has to.

    :raise InvalidArgument: something is malformed; names the field.
    """
    numbers = (
        ("run_as_user", [context.run_as_user.value]),
        ("run_as_group", [context.run_as_group.value]),
        ("supplemental_groups", context.supplemental_groups),
    )
    for field, values in numbers:
        for value in values:
            if not 0 <= value <= MAX_ID:
                raise InvalidArgument(f"security_context.{field}: {value} is not 0 to {MAX_ID}")
    user = _user_field(context)
    if context.HasField("run_as_group") and not user:
        raise InvalidArgument("security_context.run_as_group: needs run_as_user or run_as_username beside it")
    if context.HasField("run_as_group") or context.supplemental_groups_policy == cri.Strict:
        return None
    return Identity(user, tuple(context.supplemental_groups))


def resolve(context: cri.LinuxContainerSecurityContext, accounts: Accounts) -> Identity:
    """Return the user and groups as numbers, looked up in the image's accounts.

    :raise InvalidArgument: the image has no such user or group.
    """
    who, _, group = (_user_field(context) or accounts.user).partition(":")
    uid, gid, name = _user(who, accounts.passwd)
    if context.HasField("run_as_group"):
        gid = context.run_as_group.value
    elif group:
        gid = _group(group, accounts.group)
    groups = list(context.supplemental_groups)
    if context.supplemental_groups_policy != cri.Strict and name:
        groups = _memberships(name, accounts.group) + groups
    return Identity(f"{uid}:{gid}", tuple(dict.fromkeys(groups)))


def _user_field(context: cri.LinuxContainerSecurityContext) -> str:
    return str(context.run_as_user.value) if context.HasField("run_as_user") else context.run_as_username


def _user(who: str, passwd: bytes) -> tuple[int, int, str]:
    """Return uid, gid and name of the first account that fits; an unknown uid has no name."""
    number = _number(who) if who else 0
    for name, _, uid, gid, *_ in _lines(passwd, 4):
        ids = _number(uid), _number(gid)
        if ids[0] is not None and ids[1] is not None and (name == who or ids[0] == number):
            return ids[0], ids[1], name
    if number is None:
        raise InvalidArgument(f"security_context: the image has no user {who[:80]!r}")
    return number, 0, ""


def _group(which: str, group: bytes) -> int:
    for name, _, gid, *_ in _lines(group, 3):
        number = _number(gid)
        if name == which and number is not None:
            return number
    number = _number(which)
    if number is None:
        raise InvalidArgument(f"security_context: the image has no group {which[:80]!r}")
    return number


def _memberships(name: str, group: bytes) -> list[int]:
    found = [(_number(gid), members) for _, _, gid, members, *_ in _lines(group, 4)]
    return [gid for gid, members in found if gid is not None and name in members.split(",")]


def _lines(text: bytes, fields: int) -> list[list[str]]:
    lines = [line.strip().split(":") for line in text.decode(errors="replace").splitlines()]
    return [line for line in lines if len(line) >= fields]


def _number(text: str) -> int | None:
    if not text.isascii() or not text.isdecimal() or len(text) > 10:
        return None
    return int(text) if int(text) <= MAX_ID else None


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
            if error.status != 409:  # that of an earlier agent serves as well
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
