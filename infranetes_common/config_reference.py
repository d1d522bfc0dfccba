# SPDX-License-Identifier: Apache-2.0
"""A reference of all keys of a configuration file, with their defaults and meanings.

Keys and defaults come from the configuration classes, the words from the tables in docs/configuration*.md.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Container, Iterator, Mapping, Sequence

import attrs

from infranetes_common.config_text import defaults

_ROW = re.compile(r"^\| `([^`]+)` \| (?:`([^`]*)`)? *\| (.+) \|$", re.MULTILINE)
_LINK = re.compile(r"\[((?:[^][]|\[[^][]*\])+)\]\([^)]*\)")
_WIDTH = 98


@attrs.frozen
class Row:
    """The page's entry for a key. :ivar default: "" where it depends on the machine, or there is none."""

    default: str
    words: str


@attrs.frozen
class Key:
    """A key. :ivar name: within its table. :ivar default: in TOML; "": there is none."""

    name: str
    default: str
    words: str
    required: bool


@attrs.frozen
class Table:
    """A table and its keys. :ivar name: dotted; "" for the keys above all tables."""

    name: str
    keys: Sequence[Key]


def rows(page: str, heading: str) -> Mapping[str, Row]:
    """Return the rows of the tables below a `## heading` of the page, by key.

    :raise LookupError: there is no such heading."""
    return {key: Row(default, words) for key, default, words in _ROW.findall(section(page, heading))}


def section(page: str, heading: str) -> str:
    """Return the text below a `## heading` of the page, or of several that follow each other.

    :raise LookupError: there is no such heading."""
    found = re.search(rf"^## {re.escape(heading)}$(.*?)(?=^##? |\Z)", page, flags=re.M | re.S)
    if found is None:
        raise LookupError(f"no heading {heading!r}")
    return found[1]


def tables(
    page: str,
    heading: str,
    cls: type[attrs.AttrsInstance],
    name: str = "",
    without: Container[str] = (),
    of_machine: bool = True,
) -> list[Table]:
    """Return the tables of a configuration class, in the page's order: its words refer to earlier ones.

    :param name: of the table that the class stands for. :param without: keys that have tables of their own.
    :param of_machine: include defaults that depend on the machine.
    """
    said = rows(page, heading)
    order = {key: number for number, key in enumerate(said)}
    found: dict[str, list[Key]] = {"": []}
    for setting in sorted(defaults(cls), key=lambda each: order.get(each.key, len(order))):
        if setting.key in without:
            continue
        table, _, last = setting.key.rpartition(".")
        row = said.get(setting.key, Row("", ""))
        default = setting.text if of_machine or row.default else ""
        found.setdefault(table, []).append(Key(last, default, plain(row.words), setting.required))
    return [Table(".".join(filter(None, (name, table))), keys) for table, keys in found.items() if keys]


def plain(words: str) -> str:
    """Return a line of Markdown as plain text."""
    return _LINK.sub(r"\1", words).replace("`", "")


def commented(tables: Sequence[Table]) -> Iterator[str]:
    """Yield the lines of a TOML file that has every key, each commented out."""
    for table in tables:
        if table.name:
            yield f"#[{table.name}]"
        for key in table.keys:
            words = f"{key.words}{' (it has to be given)' if key.required else ''}"
            yield from textwrap.wrap(words, _WIDTH, initial_indent="# ", subsequent_indent="# ")
            yield f"#{key.name} = {key.default}".rstrip()
        yield ""
