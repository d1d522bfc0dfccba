# SPDX-License-Identifier: Apache-2.0
"""What a configuration names outside of its files: files, directories, programs, sockets, servers.

A field whose value names something has a `Look` in its metadata (`names`), and a class whose keys name
something together has a method `look_outside`, which yields what a `Look` does, each with its key. Where
there is nothing to say of a thing it was looked at, and is right.
"""

from __future__ import annotations

import enum
import errno
import json
import os
import socket
import stat
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import attrs

from infranetes_common.errors import InfranetesError

CONNECT_SECONDS = 2.0
_NAMES = "names"


class Verdict(enum.Enum):
    """What came of a look."""

    WRONG = "wrong"  # the daemon does not start with it, or something that is configured can't work
    WARNING = "warning"  # it works, worse than it may be meant to, or as soon as something is there
    UNSEEN = "unseen"  # it was not looked at


@attrs.frozen
class Finding:
    """What came of a look at something.

    :ivar key: the dotted key that it concerns, below the table that was looked at; "": the field's own."""

    verdict: Verdict
    words: str
    key: str = ""


Look = Callable[[Any], Iterable[Finding]]  # Any: the value of the field
"""A function that checks what a field's value names, such as a file. It blocks, and changes nothing."""


@runtime_checkable
class NamesOutside(Protocol):
    """A table that names something by several keys together."""

    def look_outside(self, is_set: Callable[[str], bool]) -> Iterable[Finding]:
        """Look at it. :param is_set: whether the files have a key of this table."""


def names(look: Look) -> dict[str, Look]:
    """Return the metadata of a field whose value names something."""
    return {_NAMES: look}


def looked_at(table: attrs.AttrsInstance, keys: Collection[str], prefix: str = "") -> Iterator[Finding]:
    """Look at all that a table and those in it name by keys that are set, each with its dotted key.

    :param keys: those that the files set, dotted. :param prefix: the table's own dotted key."""

    def full(key: str) -> str:
        return ".".join(filter(None, (prefix, key)))

    for field in attrs.fields(type(table)):
        value, key = getattr(table, field.name), full(field.alias)
        if attrs.has(type(value)):
            yield from looked_at(value, keys, key)
        elif _NAMES in field.metadata and key in keys:
            yield from (attrs.evolve(said, key=key) for said in _look(field, value))
    if isinstance(table, NamesOutside):
        for said in table.look_outside(lambda key: full(key) in keys):
            yield attrs.evolve(said, key=full(said.key))


def named(table: attrs.AttrsInstance, keys: Collection[str], prefix: str = "") -> Iterator[str]:
    """Yield the keys at which `looked_at` would look at something; for what several name, their table's."""
    beginning = f"{prefix}." if prefix else ""
    for field in attrs.fields(type(table)):
        value, key = getattr(table, field.name), f"{beginning}{field.alias}"
        if attrs.has(type(value)):
            yield from named(value, keys, key)
        elif _NAMES in field.metadata and key in keys and value:
            yield key
    if isinstance(table, NamesOutside) and any(key.startswith(beginning) for key in keys):
        yield prefix


def _look(field: attrs.Attribute[object], value: object) -> Iterable[Finding]:
    if value or value is None:
        look: Look = field.metadata[_NAMES]
        return look(value) if value else ()
    return [wrong("it can't be empty: give it a value, or leave it out")] if field.default else ()


# -- looks


def wrong(words: str, key: str = "") -> Finding:
    return Finding(Verdict.WRONG, words, key)


def warning(words: str, key: str = "") -> Finding:
    return Finding(Verdict.WARNING, words, key)


def unseen(words: str, key: str = "") -> Finding:
    return Finding(Verdict.UNSEEN, words, key)


def for_each(look: Look) -> Look:
    """Return a look at each of several values."""
    return lambda values: (said for value in values for said in look(value))


def never(words: str) -> Look:
    """Return the look at something that is never looked at. :param words: why."""
    return lambda value: [unseen(words)]


def tried(read: Callable[[], object], key: str = "") -> Iterator[Finding]:
    """Read something as the daemon does; say why that fails.

    :param key: of it, which errors of `read` may begin with."""
    try:
        read()
    except Exception as error:  # whatever the reader raises says what is wrong
        cause = error if isinstance(error, OSError) else error.__cause__ or error.__context__
        words = str(error).removeprefix(key).lstrip(": ")
        if isinstance(error, OSError):
            words = f"{error.filename} can't be read: {error.strerror}"
        yield unseen(_closed(words)) if _needs_root(cause) else wrong(words)


def file(path: str | Path) -> Iterator[Finding]:
    """Look at a file that the daemon reads."""
    if not os.path.isabs(path):
        yield warning(f"{str(path)!r} is not an absolute path: it is looked for where the daemon is started")
        return
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            kind = "a directory" if os.path.isdir(path) else "something else"
            yield wrong(f"{path} is {kind}: a file is expected")
            return
        with open(path, "rb") as opened:
            opened.read(1)
    except OSError as error:
        yield _failed(path, error)


def _parsed(path: str | Path, parse: Callable[[str], object], kind: str) -> Iterator[Finding]:
    found = list(file(path))
    yield from found
    if not found:
        try:
            parse(Path(path).read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            yield wrong(f"{path} is no {kind}: {error}")


def json_file(path: str | Path) -> Iterator[Finding]:
    """Look at a file of JSON that others read for the daemon."""
    return _parsed(path, json.loads, "JSON")


def toml_file(path: str | Path) -> Iterator[Finding]:
    """Look at a file of TOML that others read for the daemon."""
    return _parsed(path, tomllib.loads, "TOML")


def directory(path: str | Path) -> Iterator[Finding]:
    """Look at a directory that the daemon makes where it is not there."""
    here = Path(path)
    while not os.path.lexists(here) and here != here.parent:
        here = here.parent
    try:
        mode = os.stat(here).st_mode
    except OSError as error:  # a link to what is not there, or is closed
        yield _failed(here, error)
        return
    if not stat.S_ISDIR(mode):
        yield wrong(f"{here} is no directory")
    elif os.geteuid() == 0 and not os.access(here, os.W_OK, effective_ids=True):
        yield wrong(f"nothing can be written in {here}")
    elif os.geteuid() != 0 and not os.access(here, os.X_OK, effective_ids=True):
        yield unseen(_closed(f"{here} can't be entered"))


def own_socket(path: str) -> Iterator[Finding]:
    """Look at a socket, a path or unix://PATH, that the daemon makes with its directory."""
    path = path.removeprefix("unix://")
    try:
        mode = os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        yield from directory(Path(path).parent)
    except OSError as error:
        yield _failed(path, error)
    else:
        if not stat.S_ISSOCK(mode):
            yield wrong(f"{path} is there and is no socket: move it away, or give another path")
            return
        found = list(server(path))
        if not found:
            yield unseen(f"another program, or the daemon itself, listens on {path!r} now")
        # One on which nobody listens is replaced.
        yield from (said for said in found if said.verdict is Verdict.UNSEEN)


def present_directory(path: str | Path) -> Iterator[Finding]:
    """Look at a directory that others make."""
    try:
        os.listdir(path)
    except FileNotFoundError:
        yield warning(f"there is no directory {path}")
    except NotADirectoryError:
        yield wrong(f"{path} is no directory")
    except OSError as error:
        yield _failed(path, error)


def network_device(kind: str) -> Look:
    """Return a look at a network device that the daemon makes where it is not there.

    :param kind: as the kernel calls it, such as bridge."""

    def look(name: str) -> Iterator[Finding]:
        try:
            about = Path(f"/sys/class/net/{name}/uevent").read_text(encoding="utf-8")
        except OSError:
            return
        if f"DEVTYPE={kind}" not in about.splitlines():
            yield wrong(f"this machine has a network device {name} already, which is no {kind}")

    return look


def program(name: str) -> Iterator[Finding]:
    """Look for a program."""
    from infranetes_common.commands import find_program  # imported late: with it comes Twisted

    try:
        find_program(name)
    except InfranetesError as error:
        yield wrong(str(error))


def block_device(path: str) -> Iterator[Finding]:
    """Look at a block device of this machine."""
    try:
        if not stat.S_ISBLK(os.stat(path).st_mode):
            yield wrong(f"{path} is no block device")
    except FileNotFoundError:
        yield warning(f"there is no device {path} now")
    except OSError as error:
        yield _failed(path, error)


def server(path: str) -> Iterator[Finding]:
    """Look whether a program listens on a unix socket, a path or unix://PATH."""
    path = path.removeprefix("unix://")
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            yield wrong(f"{path} is no socket")
            return
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(CONNECT_SECONDS)
            client.connect(path)
    except (FileNotFoundError, ConnectionRefusedError):
        yield warning(f"nobody listens on {path!r} now; the daemon waits until somebody does")
    except NotADirectoryError as error:
        yield _failed(path, error)
    except OSError as error:
        yield unseen(_closed(str(error.strerror)) if _needs_root(error) else f"{path}: {error}")


def listening(host: str, port: int) -> Iterator[Finding]:
    """Look whether the daemon can listen on an IP address and port of this machine; port 0: any."""
    kind = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(kind, socket.SOCK_STREAM) as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind((host, port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            yield unseen(f"another program, or the daemon itself, listens on port {port} now")
        elif _needs_root(error):
            yield unseen(_closed(f"port {port} is for root"))
        elif error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            yield wrong(f"{host} is no address of this machine")
        else:
            yield wrong(f"{host} port {port} can't be listened on: {error.strerror}")


def _needs_root(error: object) -> bool:
    return isinstance(error, PermissionError) and os.geteuid() != 0


def _closed(words: str) -> str:
    return f"{words}: only root can look at it; check as root"


def _failed(path: str | Path, error: OSError) -> Finding:
    words = f"{path} can't be read: {error.strerror}"
    return unseen(_closed(words)) if _needs_root(error) else wrong(words)
