# SPDX-License-Identifier: Apache-2.0
"""A configuration's files: the given file, and the drop-ins in the directory beside it.

The drop-ins of FILE are FILE.d/*.toml, in the order of their names. A later file's key wins; tables are
merged, and anything else, including lists, is replaced.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

from infranetes_common.config_lines import lines_of
from infranetes_common.errors import ConfigError
from infranetes_common.toml_errors import explained

MAX_FILE_BYTES = 1024 * 1024
SUFFIX = ".d"  # of the name of the drop-ins' directory


@attrs.frozen
class Place:
    """The file and line that gave a key its value."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@attrs.frozen
class Sources:
    """The files of a configuration, and the place of each of their keys.

    :ivar main: the given file, or the words for it in errors. :ivar drop_ins: the other files.
    :ivar places: by dotted key; a table's place is that of its first header.
    """

    main: str
    drop_ins: Sequence[str] = ()
    places: Mapping[str, Place] = attrs.field(factory=dict)

    @property
    def files(self) -> Sequence[str]:
        """The files in the order in which they were read."""
        return (self.main, *self.drop_ins)

    def place_of(self, key: str) -> Place | None:
        """Return where a key, or else the innermost table around it, is given; None: nowhere."""
        while key and key not in self.places:
            key = key.rpartition(".")[0]
        return self.places.get(key)

    def placed(self, error: ConfigError) -> ConfigError:
        """Return `error` with each line naming the drop-in that its key is in, where it names the main file.

        A check of a value knows its key and the given file, not the drop-ins."""
        return ConfigError("\n".join(self._placed(line) for line in str(error).splitlines()))

    def _placed(self, line: str) -> str:
        beginning = f"{self.main}: "
        if not self.drop_ins or not line.startswith(beginning):
            return line
        words = line.removeprefix(beginning)
        place = self.place_of(words.partition(": ")[0].partition(",")[0])
        return f"{place.file}: {words}" if place is not None else line


@attrs.frozen
class Document:
    """The content of a configuration's files, merged."""

    table: dict[str, object]
    sources: Sources


@attrs.frozen
class Readable:
    """What can be read of a configuration's files. :ivar faults: a line for each that can't, with why."""

    document: Document
    faults: Sequence[str]


def read(path: str | os.PathLike[str]) -> Document:
    """Read the file at `path` and its drop-ins.

    :raise ConfigError: some of them can't be read, or are not TOML."""
    found = readable(path)
    if found.faults:
        raise ConfigError("\n".join(found.faults))
    return found.document


def readable(path: str | os.PathLike[str]) -> Readable:
    """Read the file at `path` and its drop-ins, as far as they can be read and are TOML."""
    table: dict[str, object] = {}
    places: dict[str, Place] = {}
    wrong: list[str] = []
    try:
        drop_ins = drop_ins_of(path)
    except ConfigError as error:
        drop_ins = ()
        wrong.append(str(error))
    for file in (os.fspath(path), *drop_ins):
        try:
            text = _text(Path(file))
            found = tomllib.loads(text)
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            wrong.append(f"{file}: not TOML: {explained(error, text)}")
            continue
        except ConfigError as error:
            wrong.append(str(error))
            continue
        _merge(table, found)
        for key, line in lines_of(text).items():
            if key not in places or not isinstance(value_of(table, key), dict):
                places[key] = Place(file, line)
    return Readable(Document(table, Sources(os.fspath(path), drop_ins, places)), wrong)


def drop_ins_of(path: str | os.PathLike[str]) -> tuple[str, ...]:
    """Return the drop-ins of a file, in their order.

    :raise ConfigError: their directory can't be read."""
    directory = os.fspath(path) + SUFFIX
    try:
        names = os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return ()
    except OSError as error:
        raise ConfigError(f"{directory}: can't be read: {error.strerror}") from None
    return tuple(os.path.join(directory, name) for name in sorted(names) if is_drop_in(name))


def is_drop_in(name: str) -> bool:
    """Return whether a file of this name in the directory is read: editors' hidden files are not."""
    return name.endswith(".toml") and not name.startswith(".")


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error.strerror}") from None
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{path}: over {MAX_FILE_BYTES} bytes, which no configuration of Infranetes is")
    try:
        return content.decode("utf-8-sig")  # some editors begin a file with a byte order mark
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}: line {line}: not UTF-8 text") from None


def _merge(into: dict[str, object], table: Mapping[str, object]) -> None:
    for key, value in table.items():
        inner = into.get(key)
        if isinstance(inner, dict) and isinstance(value, dict):
            _merge(inner, value)
        else:
            into[key] = value


def value_of(table: object, key: str) -> object:
    """Return the value of a dotted key; None: there is none, or a name in it has a dot or is of a list."""
    for name in key.split("."):
        if not isinstance(table, dict):
            return None
        table = table.get(name)
    return table
