# SPDX-License-Identifier: Apache-2.0
"""`infranetes-ctl explain`: what an annotation or a key of the configuration means. It needs no daemon."""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from importlib import resources

import attrs

from infranetes.ctl.config_files import reference
from infranetes.ctl.session import DONE, FAILED, written
from infranetes.ctl.tables import Column, Json, lines, listing
from infranetes.ctl.view import view_of
from infranetes.providers.annotation_rows import PREFIX
from infranetes_common.config_reference import plain

PAGE = "annotations.md"  # a copy of docs/annotations.md
_HEADING = re.compile(r"^## (.+)$", re.M)
_ROW = re.compile(r"^\| `(infranetes\.io/[a-z-]+)` \|([^|]*)\|([^|]*)\|(.*)\|([^|]*)\|$", re.M)
_WIDTH = 98
_COLUMNS = (
    Column("ANNOTATION"),
    Column("VALUE", least=12, gives_way=1),
    Column("WHAT IT DOES", least=30),
)


@attrs.frozen
class Annotation:
    """An annotation as the page has it. :ivar pods: which pods may have it."""

    name: str
    earlier: Sequence[str]
    value: str
    what: str
    example: str
    pods: str


@attrs.frozen
class Key:
    """A key of infranetes.toml."""

    name: str
    default: str
    what: str
    required: bool


def all_annotations() -> list[Annotation]:
    """Return all annotations that pods may have."""
    page = resources.files("infranetes.ctl").joinpath(PAGE).read_text(encoding="utf-8")
    whose = {match.start(): match[1] for match in _HEADING.finditer(page)}
    found = []
    for row in _ROW.finditer(page):
        name, earlier, value, what, example = (plain(cell.strip()) for cell in row.groups())
        above = [words for start, words in whose.items() if start < row.start()]
        pods = above[-1].removeprefix("For ") if above else "all pods"
        found.append(Annotation(name, re.findall(r"[\w.-]+", earlier), value, what, example, pods))
    return found


def explain(options: argparse.Namespace) -> int:
    """Print what is meant; return the exit status."""
    known = all_annotations()
    if not options.name:
        return _list(known, options)
    word = options.name.strip()
    for each in known:
        if word in (each.name, each.name.removeprefix(PREFIX), *each.earlier):
            return _tell(_annotation_json(each), _annotation_text(each), options)
    keys = [
        Key(".".join(filter(None, (table.name, key.name))), key.default, key.words, key.required)
        for table in reference()
        for key in table.keys
    ]
    meant = [key for key in keys if key.name == word] or [key for key in keys if _is_below(key.name, word)]
    if meant:
        shown: Json = {"keys": [attrs.asdict(key) for key in meant]}
        return _tell(shown, "\n\n".join(_key_text(key) for key in meant), options)
    return _unknown(word, known, keys, options)


def _is_below(key: str, word: str) -> bool:
    """Whether a key is in a table, or is called so in whatever table."""
    return key.startswith(f"{word}.") or key.rpartition(".")[2] == word


def _list(known: Iterable[Annotation], options: argparse.Namespace) -> int:
    rows = [(each.name, each.value, each.what) for each in known]
    shown: Json = {"annotations": [_annotation_json(each) for each in known]}
    return _tell(shown, listing(_COLUMNS, rows, view_of(options)), options)


def _tell(document: Json, text: str, options: argparse.Namespace) -> int:
    print(written(document, options) if options.json else text)
    return DONE


def _annotation_json(each: Annotation) -> Json:
    return {"annotation": each.name, **attrs.asdict(each, filter=lambda field, _: field.name != "name")}


def _annotation_text(each: Annotation) -> str:
    return lines(
        f"annotation  {each.name}",
        f"earlier     {', '.join(each.earlier)}" if each.earlier else "",
        f"value       {each.value}",
        f"such as     {each.example}" if each.example else "",
        f"for         {each.pods}",
        *_wrapped(each.what),
    )


def _key_text(key: Key) -> str:
    default = "it has to be given" if key.required else key.default
    return lines(
        f"key         {key.name}",
        f"default     {default}" if default else "",
        *_wrapped(key.what),
    )


def _wrapped(words: str) -> Iterator[str]:
    yield from textwrap.wrap(words, _WIDTH, initial_indent="what        ", subsequent_indent=" " * 12)


def _unknown(word: str, known: Iterable[Annotation], keys: Iterable[Key], options: argparse.Namespace) -> int:
    names = {each.name.removeprefix(PREFIX): each.name for each in known}
    names |= {key.name: key.name for key in keys}
    alike = get_close_matches(word.removeprefix(PREFIX), names, n=3, cutoff=0.6)
    guess = f"did you mean {' or '.join(names[each] for each in alike)}?" if alike else ""
    words = f"there is no annotation and no key {word[:80]!r}" + (f"; {guess}" if guess else "")
    if options.json:
        print(written({"error": words}, options))
    print(f"infranetes-ctl: {words}", file=sys.stderr)
    return FAILED
