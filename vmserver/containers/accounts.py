# SPDX-License-Identifier: Apache-2.0
"""The user and groups of a container's first process, from an image's /etc/passwd and /etc/group."""

from __future__ import annotations

import re
from collections.abc import Iterator

import attrs

from infranetes_common.errors import InvalidArgument
from infranetes_common.wire import cri

MAX_FILE_BYTES = 1024 * 1024
MAX_ID = 2**31 - 1
_LINE = re.compile(rb"^[^:\n]+:[^\n]*", re.MULTILINE)  # that has a name
_MOST_FIELDS = 16
MAX_GROUPS = 65536  # the kernel's NGROUPS_MAX
_HOME = "/"  # of a user that the image's passwd does not list


@attrs.frozen
class Accounts:
    """The two files of an image (empty where it has none) and the user in its configuration."""

    passwd: bytes = b""
    group: bytes = b""
    user: str = ""


@attrs.frozen
class ProcessUser:
    """The ids of a process. `groups` are the supplementary ones, without duplicates."""

    uid: int = 0
    gid: int = 0
    groups: tuple[int, ...] = ()
    home: str = _HOME


def check(context: cri.LinuxContainerSecurityContext) -> None:
    """Check the configured user and groups. :raise InvalidArgument: one is malformed; names the field."""
    numbers = (
        ("run_as_user", [context.run_as_user.value]),
        ("run_as_group", [context.run_as_group.value]),
        ("supplemental_groups", context.supplemental_groups),
    )
    for field, values in numbers:
        for value in values:
            if not 0 <= value <= MAX_ID:
                raise InvalidArgument(f"security_context.{field}: {value} is not 0 to {MAX_ID}")
    if len(context.supplemental_groups) > MAX_GROUPS:
        raise InvalidArgument(f"security_context.supplemental_groups: more than {MAX_GROUPS}")
    if context.HasField("run_as_group") and not user_field(context):
        raise InvalidArgument("security_context.run_as_group: needs run_as_user or run_as_username beside it")


def resolve(context: cri.LinuxContainerSecurityContext, accounts: Accounts) -> ProcessUser:
    """Return the user and groups, looked up in the image's accounts.

    :raise InvalidArgument: the image has no such user or group.
    """
    who, _, group = (user_field(context) or accounts.user).partition(":")
    uid, gid, name, home = _user(who, accounts.passwd)
    if context.HasField("run_as_group"):
        gid = context.run_as_group.value
    elif group:
        gid = _group(group, accounts.group)
    groups = list(context.supplemental_groups)
    if context.supplemental_groups_policy != cri.Strict and name:
        groups = _memberships(name, accounts.group) + groups
    if len(groups) > MAX_GROUPS:
        raise InvalidArgument(f"security_context: user {name[:80]!r} is in more than {MAX_GROUPS} groups")
    return ProcessUser(uid, gid, tuple(dict.fromkeys(groups)), home)


def user_field(context: cri.LinuxContainerSecurityContext) -> str:
    """Return the configured user, a name or a number; "" for the image's."""
    return str(context.run_as_user.value) if context.HasField("run_as_user") else context.run_as_username


def _user(who: str, passwd: bytes) -> tuple[int, int, str, str]:
    """Return uid, gid, name and home of the first account that fits; an unknown uid has no name."""
    number = _number(who) if who else 0
    for name, _, uid, gid, *more in _lines(passwd, 4):
        ids = _number(uid), _number(gid)
        if ids[0] is not None and ids[1] is not None and (name == who or ids[0] == number):
            home = more[1] if len(more) > 1 and more[1].startswith("/") and "\0" not in more[1] else _HOME
            return ids[0], ids[1], name, home
    if number is None:
        raise InvalidArgument(f"security_context: the image has no user {who[:80]!r}")
    return number, 0, "", _HOME


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
    found = (_number(gid) for _, _, gid, members, *_ in _lines(group, 4) if name in members.split(","))
    return [gid for gid in found if gid is not None]


def _lines(text: bytes, fields: int) -> Iterator[list[str]]:
    """Yield the fields of each line: a list of all would be eighty times as large as the file."""
    for found in _LINE.finditer(text):
        line = found[0].decode(errors="replace").strip().split(":", _MOST_FIELDS)
        if len(line) >= fields:
            yield line


def _number(text: str) -> int | None:
    if not text.isascii() or not text.isdecimal() or len(text) > 10:
        return None
    return int(text) if int(text) <= MAX_ID else None
