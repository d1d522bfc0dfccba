# SPDX-License-Identifier: Apache-2.0
"""Plots of the benches' times and rates over the last runs, as SVG.

A row is one thing that was measured, with our values and those of others. The latest value is large and
labelled with its number; the earlier ones are small and pale. A line leads from a median to a higher
percentile where that is known too. Only measured values are drawn. The same figures make the same bytes.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import attrs

from bench import history
from bench.figures import Missing, number, percentile_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.typing import RcKeyType

#: By the unit of the figures: the name of their plot, its unit, and the factor that converts to it.
UNITS = {
    "s": ("times", "s", 1.0),
    "ms": ("times", "s", 1e-3),
    "MB/s": ("rates", "MB/s", 1.0),
    "calls/s": ("rates", "calls/s", 1.0),
    "/s": ("rates", "/s", 1.0),
}
HIGH = (95, 99, 100)  # the first of these percentiles that is known is drawn beside a median
OURS = "Infranetes"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#aa4499")  # distinguishable by people who are colour-blind
MARKERS = ("o", "s", "D", "^")
INK, PALE = "#222222", "#999999"
LABEL = 40  # characters at which a row's name is wrapped
STYLE: dict[RcKeyType, str | float] = {
    "svg.hashsalt": "infranetes",  # otherwise the ids inside the file are random
    "svg.fonttype": "none",  # text stays text, which is smaller and can be searched
    "font.family": "sans-serif",
    "font.size": 9.0,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": PALE,
    "xtick.color": INK,
    "ytick.color": INK,
}


@attrs.frozen
class Point:
    """A value of one run. :ivar high: which higher percentile is known, and its value."""

    value: float
    high: tuple[int, float] | None = None


@attrs.frozen
class Row:
    """One thing that was measured. :ivar series: the points by whose they are, the latest last."""

    name: str
    series: Mapping[str, Sequence[Point]]
    target: float | None = None


@attrs.frozen
class Plot:
    """A plot.

    :ivar name: of its file. :ivar unit: of all its values.
    :ivar names: the series' in the order of their colours; (): as they come.
    :ivar equal: where a line is, on one side of which is better.
    """

    name: str
    title: str
    unit: str
    rows: Sequence[Row]
    names: Sequence[str] = ()
    equal: float | None = None


_Key: TypeAlias = tuple[str, str]  # a plot's name and its unit
_Values: TypeAlias = dict[int | None, float]  # by percentile; None: a single value


def plots(runs: Sequence[history.Document], titles: Mapping[str, str]) -> list[Plot]:
    """Return the plots of these runs, of which the last is the latest. :param titles: by bench."""
    points: dict[_Key, dict[str, dict[str, list[Point]]]] = {}
    benches: dict[_Key, str] = {}
    targets: dict[tuple[_Key, str], float] = {}
    for run in runs:
        found: dict[tuple[_Key, str, str], _Values] = {}
        for figure in history.figures(run):
            if figure.unit not in UNITS or figure.value <= 0:  # 0 has no place on a logarithmic axis
                continue
            kind, unit, scale = UNITS[figure.unit]
            key = (f"{figure.bench}-{kind}", unit)
            benches[key] = figure.bench
            found.setdefault((key, figure.name, figure.whose), {})[figure.percent] = figure.value * scale
            if figure.target and figure.percent in (None, 50):
                targets[key, figure.name] = figure.target * scale
        for (key, name, whose), values in found.items():
            if (point := _point(values)) is not None:
                points.setdefault(key, {}).setdefault(name, {}).setdefault(whose, []).append(point)
    return [
        Plot(key[0], titles.get(benches[key], benches[key]), key[1], _rows(key, rows, targets))
        for key, rows in points.items()
    ]


def _rows(
    key: _Key, rows: Mapping[str, Mapping[str, Sequence[Point]]], targets: Mapping[tuple[_Key, str], float]
) -> list[Row]:
    return [Row(name, series, targets.get((key, name))) for name, series in rows.items()]


def _point(values: _Values) -> Point | None:
    middle = values.get(50, values.get(None))
    high = next(((percent, values[percent]) for percent in HIGH if percent in values), None)
    return None if middle is None else Point(middle, high)


def draw(plots: Iterable[Plot], directory: Path) -> list[Path]:
    """Write each as DIRECTORY/NAME.svg. :raise Missing: matplotlib is not installed."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure as Picture
    except ImportError as error:
        raise Missing(f"no plots without matplotlib: pip install '.[bench]' ({error})") from error
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for plot in plots:
        lines = [max(len(row.series), len(_wrapped(row).splitlines())) for row in plot.rows]
        with rc_context(STYLE):
            picture = Picture(figsize=(8.0, 1.1 + 0.2 * sum(lines) + 0.1 * len(lines)), facecolor="white")
            _draw(plot, lines, picture.add_subplot())
            path = directory / f"{plot.name}.svg"
            picture.savefig(path, metadata={"Date": None, "Creator": None}, bbox_inches="tight")
        written.append(path)
    return written


def _draw(plot: Plot, lines: Sequence[int], axes: Axes) -> None:
    names = plot.names or dict.fromkeys(whose for row in plot.rows for whose in row.series)
    marks = dict(zip(names, zip(COLOURS, MARKERS, strict=True), strict=False))
    places, below = [], 0.0
    for row, height in zip(plot.rows, lines, strict=True):
        middle = below + height / 2
        places.append(middle)
        for number_, (whose, points) in enumerate(row.series.items()):
            y = middle + number_ - (len(row.series) - 1) / 2
            _draw_series(axes, points, y, *marks[whose], plot.unit)
        if row.target is not None:
            axes.plot([row.target] * 2, [below, below + height], color=PALE, linewidth=2, zorder=0)
        below += height + 0.5
    if plot.equal is not None:
        axes.axvline(plot.equal, color=INK, linewidth=0.8, zorder=0)
    _scale(axes, plot.unit, finely=plot.equal is not None)
    axes.set_ylim(below, -0.5)
    axes.set_yticks(places, [_wrapped(row) for row in plot.rows])
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#e5e5e5", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.set_title(plot.title, loc="left", fontsize=10, color=INK, pad=24)
    _explain(axes, plot, marks)


def _scale(axes: Axes, unit: str, finely: bool) -> None:
    """Make the axis logarithmic, and label it with plain numbers, not powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_xscale("log")
    axes.margins(x=0.14)
    lowest, highest = axes.get_xlim()
    steps = (1.0, 2.0, 5.0) if finely or highest / lowest <= 30 else (1.0,)
    axes.xaxis.set_major_locator(LogLocator(subs=steps))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: written(value, unit)))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _draw_series(axes: Axes, points: Sequence[Point], y: float, colour: str, marker: str, unit: str) -> None:
    *earlier, newest = points
    before = [point.value for point in earlier]
    axes.plot(before, [y] * len(before), marker, color=colour, alpha=0.3, markersize=3)
    end = newest.value
    if newest.high is not None:
        end = newest.high[1]
        axes.plot([newest.value, end], [y, y], color=colour, linewidth=1.2)
        axes.plot([end], [y], "|", color=colour, markersize=6)
    axes.plot([newest.value], [y], marker, color=colour, markersize=5)
    axes.annotate(
        f"{written(newest.value, unit)}{f' to {written(end, unit)}' if newest.high else ''}",
        (max(end, newest.value), y), (6, 0), textcoords="offset points", va="center", fontsize=8,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5}, zorder=1,
    )  # fmt: skip


def _explain(axes: Axes, plot: Plot, marks: Mapping[str, tuple[str, str]]) -> None:
    """Put a legend above the plot: whose the markers are, and what the lines mean."""
    from matplotlib.lines import Line2D

    handles = []
    if len(marks) > 1:
        for whose, (colour, marker) in marks.items():
            handles.append(Line2D([], [], color=colour, marker=marker, linestyle="", label=whose or OURS))
    series = [points for row in plot.rows for points in row.series.values()]
    highs = sorted({points[-1].high[0] for points in series if points[-1].high is not None})
    if highs:
        what = ", ".join("the longest" if percent == 100 else percentile_name(percent) for percent in highs)
        handles.append(Line2D([], [], color=INK, linewidth=1.2, marker="|", label=f"up to {what}"))
    if any(len(points) > 1 for points in series):
        handles.append(
            Line2D([], [], color=INK, marker="o", markersize=3, alpha=0.3, linestyle="", label="earlier runs")
        )
    if any(row.target is not None for row in plot.rows):
        handles.append(Line2D([], [], color=PALE, linewidth=2, label="target"))
    if handles:
        axes.legend(
            handles=handles, loc="lower left", bbox_to_anchor=(0, 1), ncol=len(handles), frameon=False,
            fontsize=8, borderaxespad=0.2, handletextpad=0.5,
        )  # fmt: skip


def written(value: float, unit: str) -> str:
    """Return a value with its unit, in milliseconds where it is a short time."""
    return f"{number(value * 1000)} ms" if unit == "s" and value < 0.1 else f"{number(value)} {unit}"


def _wrapped(row: Row) -> str:
    return textwrap.fill(row.name, LABEL)
