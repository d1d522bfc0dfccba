# SPDX-License-Identifier: Apache-2.0
"""What docs/performance.md begins with: our figures beside a floor's or a peer's, as a picture and a table.

``python -m bench.ratios`` draws both from docs/ratios.json, which has a line for each. A ratio says how many
times as much time or memory we take, or of rates, how many times as much the peer carries: less is better.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import attrs
import cattrs

from bench.figures import number
from bench.plots import Plot, Point, Row, draw, written

DOCS = Path(__file__).resolve().parents[1] / "docs"
FIGURES = DOCS / "ratios.json"
PAGE = DOCS / "performance.md"
NAME = "ratios"
TIMES = "\N{MULTIPLICATION SIGN}"
TITLE = "How many times as much as a peer or a floor: less is better"
HEAD = ("What", "Infranetes", "Beside it", "Ratio", "Target", "", "Run", "What bounds it")
#: What a row's point says of its target, in the order of the legend.
MET, MISSED, NO_TARGET = "target met", "target missed", "no target"
_TABLE = re.compile(r"(?<=<!-- ratios -->\n).*?(?=<!-- /ratios -->\n)", flags=re.S)


@attrs.frozen
class Ratio:
    """One figure beside another.

    :ivar beside: whose the other is. :ivar target: of the ratio. :ivar taken: the bench and the load.
    :ivar bound: a sentence on what it is bound by.
    """

    what: str
    beside: str
    ours: float
    theirs: float
    unit: str
    target: float | None
    taken: str
    bound: str

    @property
    def value(self) -> float:
        """How many times as much."""
        return self.theirs / self.ours if self.unit.endswith("/s") else self.ours / self.theirs

    @property
    def outcome(self) -> str:
        """Whether the target is met."""
        if self.target is None:
            return NO_TARGET
        return MET if self.value <= self.target else MISSED


def read(file: Path = FIGURES) -> list[Ratio]:
    """Read the figures."""
    return cattrs.structure(json.loads(file.read_bytes()), list[Ratio])


def plot(ratios: Sequence[Ratio]) -> Plot:
    """Return the picture of them."""
    rows = [
        Row(f"{each.what}, beside {each.beside}", {each.outcome: [Point(each.value)]}, each.target)
        for each in ratios
    ]
    return Plot(NAME, TITLE, TIMES, rows, names=(MET, MISSED, NO_TARGET), equal=1.0)


def table(ratios: Sequence[Ratio]) -> str:
    """Return them as a table in Markdown."""
    lines = [HEAD, ("---",) * len(HEAD)]
    for each in ratios:
        target = "" if each.target is None else f"{number(each.target)} {TIMES}"
        outcome = "" if each.target is None else each.outcome.removeprefix("target ")
        ours, theirs = (written(value, each.unit) for value in (each.ours, each.theirs))
        ratio = f"{number(each.value)} {TIMES}"
        lines.append(
            (each.what, ours, f"{each.beside}: {theirs}", ratio, target, outcome, each.taken, each.bound)
        )
    return "".join(f"| {' | '.join(line)} |\n".replace("|  |", "| |") for line in lines)


def with_table(page: str, ratios: Sequence[Ratio]) -> str:
    """Return the page with this table in place of the one that it has."""
    return _TABLE.sub(lambda _: table(ratios), page, count=1)


def main() -> None:
    """Draw the picture and write the table."""
    ratios = read()
    draw([plot(ratios)], DOCS / "performance")
    PAGE.write_text(with_table(PAGE.read_text(), ratios))


if __name__ == "__main__":
    main()
