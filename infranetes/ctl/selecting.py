# SPDX-License-Identifier: Apache-2.0
"""Which entries of a list are meant: by namespace, labels, and names or ids or the beginnings of them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Protocol, TypeVar

from infranetes.policies.selectors import Requirement, Selector
from infranetes_common.errors import NotFound

_SET = re.compile(r"\s*(?P<key>[A-Za-z0-9][\w./-]*)\s+(?P<not>not)?in\s*\((?P<values>[^()]*)\)\s*")
_EQUAL = re.compile(r"\s*(?P<key>[A-Za-z0-9][\w./-]*)\s*(?P<is>==|=|!=)\s*(?P<value>[^\s=!,()]*)\s*")
_THERE = re.compile(r"\s*(?P<not>!?)\s*(?P<key>[A-Za-z0-9][\w./-]*)\s*")


class Named(Protocol):
    """An entry that is a pod, or belongs to one."""

    @property
    def namespace(self) -> str: ...

    @property
    def name(self) -> str: ...

    @property
    def labels(self) -> Mapping[str, str]: ...


_Entry = TypeVar("_Entry")


def label_selector(text: str) -> Selector:
    """Read a label selector such as `app=web,tier!=front,env in (a, b),!canary`.

    :raise ArgumentTypeError: it is none."""
    requirements: list[Requirement] = []
    place = 0
    while True:
        match = next(
            (found for form in (_SET, _EQUAL, _THERE) if (found := form.match(text, place)) is not None), None
        )
        if match is None or (match.end() < len(text) and text[match.end()] != ","):
            raise argparse.ArgumentTypeError(
                f"{text[:80]!r} is no selector such as app=web,tier!=front or 'env in (a,b),!canary'"
            )
        requirements.append(_requirement(match))
        if match.end() == len(text):
            return Selector(frozenset(requirements))
        place = match.end() + 1


def _requirement(match: re.Match[str]) -> Requirement:
    found = match.groupdict()
    if "values" in found:
        values = frozenset(value.strip() for value in found["values"].split(","))
        return Requirement(found["key"], "NotIn" if found["not"] else "In", values)
    if "value" in found:
        operator = "NotIn" if found["is"] == "!=" else "In"
        return Requirement(found["key"], operator, frozenset((found["value"],)))
    return Requirement(found["key"], "DoesNotExist" if found["not"] else "Exists")


def selected(
    entries: Iterable[_Entry], options: argparse.Namespace, pod_of: Callable[[_Entry], Named]
) -> Iterator[_Entry]:
    """Yield the entries of the namespace and with the labels that the command line asks for.

    Options that a command does not have ask for nothing."""
    namespace = "" if getattr(options, "all_namespaces", False) else getattr(options, "namespace", None)
    selector: Selector | None = getattr(options, "selector", None)
    for entry in entries:
        pod = pod_of(entry)
        if namespace and pod.namespace != namespace:
            continue
        if selector is None or selector.matches(pod.labels):
            yield entry


def named(
    entries: Sequence[_Entry], words: Sequence[str], names: Callable[[_Entry], Sequence[str]], kind: str
) -> list[_Entry]:
    """Return the entries that words mean: by a name or an id, or else by the beginning of one.

    :param words: none: all are meant. :param names: of an entry, its ids too.
    :param kind: what the entries are, in the singular.
    :raise NotFound: a word means none."""
    if not words:
        return list(entries)
    known = [tuple(names(entry)) for entry in entries]
    meant: set[int] = set()
    for given in words:
        word = given.removeprefix(f"{kind}/")
        found = {number for number, its in enumerate(known) if word in its or given in its}
        found = found or {n for n, its in enumerate(known) if any(each.startswith(word) for each in its)}
        if not found:
            raise NotFound(_unknown(kind, word, known))
        meant |= found
    return [entry for number, entry in enumerate(entries) if number in meant]


def _unknown(kind: str, word: str, known: Iterable[Sequence[str]]) -> str:
    alike = get_close_matches(word, {name for its in known for name in its}, n=3, cutoff=0.6)
    guess = f"; did you mean {' or '.join(sorted(alike))}?" if alike else ""
    return f"there is no {kind} {word[:80]!r} here, nor one whose name or id begins so{guess}"
