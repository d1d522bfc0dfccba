# SPDX-License-Identifier: Apache-2.0
"""Mutants that behave as the original does, or differ in nothing that is promised, listed with the reason."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from pathlib import Path

import attrs
import cattrs

from tests.mutants.mutant import Mutant

FILE = Path(__file__).with_name("equivalents.toml")


@attrs.frozen
class Equivalent:
    """An entry of the list: a mutant by its texts, not by lines, which change too often."""

    module: str
    function: str
    before: str
    after: str
    reason: str

    def matches(self, mutant: Mutant) -> bool:
        """Return whether it means this mutant."""
        return (self.module, self.function, self.before, self.after) == (
            mutant.module,
            mutant.function,
            mutant.before,
            mutant.after,
        )


def read(file: Path = FILE) -> list[Equivalent]:
    """Return the list."""
    converter = cattrs.Converter(forbid_extra_keys=True)
    return converter.structure(tomllib.loads(file.read_text())["equivalent"], list[Equivalent])


def without(mutants: Iterable[Mutant], equivalents: Iterable[Equivalent]) -> list[Mutant]:
    """Return the mutants that are not listed."""
    listed = {(each.module, each.function, each.before, each.after) for each in equivalents}
    return [each for each in mutants if (each.module, each.function, each.before, each.after) not in listed]


def entry(mutant: Mutant) -> str:
    """Return the entry that would list a mutant, without a reason."""
    return "\n".join(
        [
            "[[equivalent]]",
            *(
                f"{name} = {_quoted(getattr(mutant, name))}"
                for name in ("module", "function", "before", "after")
            ),
            'reason = ""',
        ]
    )


def _quoted(text: str) -> str:
    if "'" not in text:
        return f"'{text}'"
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
