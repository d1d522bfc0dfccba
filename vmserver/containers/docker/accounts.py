"""Users and groups as an image's /etc/passwd and /etc/group have them.

Docker reads both by itself, and merges the groups that a user is a member of unless a group is named
beside the user. So where the CRI wants what Docker would not do of itself, who the first process is to be
is worked out here and said in numbers, which Docker takes as they are.
"""

from __future__ import annotations

import io
import posixpath
import tarfile
from typing import Any

import attrs
from twisted.internet.defer import DeferredLock

from infranetes_common import cri
from infranetes_common.errors import InvalidArgument
from vmserver.containers.docker.engine import Engine, EngineError
from vmserver.containers.docker.security import NAME_PREFIX

MAX_FILE_BYTES = 1024 * 1024
MAX_ID = 2**31 - 1
_LINKS = 8  # followed at most
_KEPT = 64  # images


@attrs.frozen
class Accounts:
    """The two files of an image, empty where it has none, and the user that it names."""

    passwd: bytes = b""
    group: bytes = b""
    user: str = ""


@attrs.frozen
class Identity:
    """In Docker's words: `User`, and `GroupAdd` in numbers."""

    user: str
    groups: tuple[int, ...]


def as_asked(context: Any) -> Identity | None:
    """Who a container's first process is, where Docker finds that by itself; None: it would not, see
    `of_image`.

    :raise InvalidArgument: malformed; names the field.
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
    user = _named(context)
    if context.HasField("run_as_group") and not user:
        raise InvalidArgument("security_context.run_as_group: needs run_as_user or run_as_username beside it")
    if context.HasField("run_as_group") or context.supplemental_groups_policy == cri.Strict:
        return None
    return Identity(user, tuple(context.supplemental_groups))


def of_image(context: Any, accounts: Accounts) -> Identity:
    """The same by the image's accounts, in numbers alone.

    :raise InvalidArgument: there is no such user or group in the image.
    """
    who, _, group = (_named(context) or accounts.user).partition(":")
    uid, gid, name = _user(who, accounts.passwd)
    if context.HasField("run_as_group"):
        gid = context.run_as_group.value
    elif group:
        gid = _group(group, accounts.group)
    groups = list(context.supplemental_groups)
    if context.supplemental_groups_policy != cri.Strict and name:
        groups = _memberships(name, accounts.group) + groups
    return Identity(f"{uid}:{gid}", tuple(dict.fromkeys(groups)))


def _named(context: Any) -> str:
    return str(context.run_as_user.value) if context.HasField("run_as_user") else context.run_as_username


def _user(who: str, passwd: bytes) -> tuple[int, int, str]:
    """Its id, its group, and its name where the image has it: the first that fits."""
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
    """Reads them, once for each image, from a container that is made for it and never started."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._known: dict[str, Accounts] = {}
        self._lock = DeferredLock()

    async def of(self, image_id: str) -> Accounts:
        """:raise EngineError: the image is not there. :raise InvalidArgument: a file is too large."""
        await self._lock.acquire()
        try:
            if image_id not in self._known:
                while len(self._known) >= _KEPT:
                    del self._known[next(iter(self._known))]
                self._known[image_id] = await self._read(image_id)
            return self._known[image_id]
        finally:
            self._lock.release()

    async def _read(self, image_id: str) -> Accounts:
        name = f"{NAME_PREFIX}accounts-{image_id.removeprefix('sha256:')[:32]}"
        user = (await self._engine.call("GET", f"/images/{image_id}/json"))["Config"].get("User") or ""
        body = {"Image": image_id, "Entrypoint": ["/"], "HostConfig": {"NetworkMode": "none"}}
        try:
            await self._engine.call("POST", "/containers/create", {"name": name}, body)
        except EngineError as error:
            if error.status != 409:  # one that an agent which is gone has made serves as well
                raise
        try:
            passwd = await self._file(name, "/etc/passwd")
            return Accounts(passwd, await self._file(name, "/etc/group"), user)
        finally:
            await self._engine.call("DELETE", f"/containers/{name}", {"force": "1", "v": "1"})

    async def _file(self, name: str, path: str) -> bytes:
        """Its content, links followed within the image; nothing where there is none."""
        for _ in range(_LINKS):
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
        found = b""
        try:
            while piece := await stream.read():
                found += piece
                if len(found) > MAX_FILE_BYTES:
                    raise InvalidArgument(f"the image's {path} has over {MAX_FILE_BYTES} bytes")
        finally:
            stream.close()
        return found
