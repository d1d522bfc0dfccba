# SPDX-License-Identifier: Apache-2.0
"""The faults of a configuration, each with the line it is in."""

from __future__ import annotations

import re
from collections.abc import Iterator

import attrs

from infranetes_common.config_files import Sources
from infranetes_common.errors import ConfigError

_LINE = re.compile(r"\bline (\d+)")  # in the messages of tomllib, and for text that is not UTF-8
_KEY = re.compile(r"([A-Za-z0-9_-]+(?:\.[^\s:]+)*)(?:, [^:]*)?: (.*)", re.DOTALL)


@attrs.frozen
class Fault:
    """A fault. :ivar line: 0 if it concerns the whole file. :ivar key: dotted; "" if it concerns no key."""

    file: str
    line: int
    key: str
    words: str

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.line else self.file
        return f"{where}: {self.key}: {self.words}" if self.key else f"{where}: {self.words}"


def located(error: ConfigError, sources: Sources) -> Iterator[Fault]:
    """Yield the faults in an error's message, which has a line `FILE: KEY: words` for each."""
    for line in str(error).splitlines():
        yield _located(line, sources)


def _located(line: str, sources: Sources) -> Fault:
    file = next((each for each in sources.files if line.startswith(f"{each}: ")), None)
    if file is None:
        return Fault(sources.main, 0, "", line)
    words = line.removeprefix(f"{file}: ")
    given = [key for key in sources.places if words.startswith(f"{key}: ")]  # of which names may be any text
    if given and not _KEY.fullmatch(words):
        key = max(given, key=len)
        return Fault(sources.places[key].file, sources.places[key].line, key, words.removeprefix(f"{key}: "))
    match = _KEY.fullmatch(words)
    if match is not None and (place := sources.place_of(match[1])) is not None:
        return Fault(place.file, place.line, match[1], match[2])
    if match is not None and not words.startswith(("not TOML", "line ")):
        return Fault(file, 0, match[1], match[2])
    numbered = _LINE.search(words)
    return Fault(file, int(numbered[1]) if numbered else 0, "", words)
