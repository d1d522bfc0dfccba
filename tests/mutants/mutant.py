# SPDX-License-Identifier: Apache-2.0
"""Mutants: modules with one bug each."""

from __future__ import annotations

import ast
import difflib
import warnings
from collections.abc import Iterator

import attrs

from tests.mutants.operators import OPERATORS, Edit, Operator
from tests.mutants.source import HAS_PLACE, Place, Source


@attrs.frozen
class Mutant:
    """A module with one bug.

    :ivar module: the module's path below the repository's root.
    :ivar function: the qualified name of the function that has the bug.
    :ivar before: the statement or expression that is changed, in one line.
    :ivar after: what it becomes.
    :ivar lines: lines of which at least one runs if the bug has an effect.
    :ivar text: the whole module with the bug.
    """

    module: str
    operator: str
    function: str
    before: str
    after: str
    lines: range
    text: str = attrs.field(repr=False)

    @property
    def line(self) -> int:
        """The first line of the bug."""
        return self.lines.start

    def difference(self, original: str) -> str:
        """Return the change as a unified difference without context."""
        lines = difflib.unified_diff(original.splitlines(), self.text.splitlines(), n=0, lineterm="")
        return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))


def mutants(module: str, text: str) -> list[Mutant]:
    """Return all mutants of a module, in the order of its text."""
    source = Source(text)
    found: dict[str, Mutant] = {}  # by the text: no two are the same
    for place in source.places():
        for operator in OPERATORS:
            for mutant in _by(operator, place, source, module):
                if _compiles(mutant.text):
                    found.setdefault(mutant.text, mutant)
    return sorted(found.values(), key=lambda mutant: (mutant.line, mutant.operator, mutant.after))


def _by(operator: Operator, place: Place, source: Source, module: str) -> Iterator[Mutant]:
    for edit in operator(place, source):
        before, after = _texts(edit, place, source)
        yield Mutant(
            module=module,
            operator=operator.__name__,
            function=place.name,
            before=before,
            after=after,
            lines=_lines(edit, place),
            text=source.replaced(edit.span, edit.replacement),
        )


def _texts(edit: Edit, place: Place, source: Source) -> tuple[str, str]:
    """Return what was there and what is there instead, with the rest of a simple statement or a condition."""
    start, end = edit.span.start, edit.span.end
    around = source.span(place.statement)
    body = getattr(place.statement, "body", None)
    if body:
        around = attrs.evolve(around, end=source.span(body[0]).start)
    if around.start <= start and end <= around.end:
        left, right = source.encoded[around.start : start].decode(), source.encoded[end : around.end].decode()
    else:
        left = right = ""
    before = left + source.encoded[start:end].decode() + right
    return " ".join(before.split()), " ".join(f"{left}{edit.replacement}{right}".split())


def _lines(edit: Edit, place: Place) -> range:
    """Return the lines of the edit; of a simple statement all, because a tracer may see only its first."""
    first, last = edit.first, edit.last
    if isinstance(first, ast.expr) and not hasattr(place.statement, "body"):
        first = last = place.statement
    assert isinstance(first, HAS_PLACE) and isinstance(last, HAS_PLACE) and last.end_lineno is not None
    return range(first.lineno, last.end_lineno + 1)


def _compiles(text: str) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        try:
            compile(text, "<mutant>", "exec")
        except SyntaxError:
            return False
    return True
