# SPDX-License-Identifier: Apache-2.0
"""What a bench reports: figures with units and targets, as a table and as JSON."""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import attrs

from bench.setup import Setup


class Missing(Exception):
    """A bench can't run here; the message says what it lacks and how to get it."""


@attrs.frozen
class Figure:
    """One measured value."""

    bench: str
    name: str
    value: float
    unit: str
    target: float | None = None  # None: no target
    note: str = ""
    at_least: bool = False  # whether the target is a minimum rather than a maximum
    whose: str = ""  # "" for Infranetes; otherwise what it is compared with, or a variant
    percent: int | None = None  # the percentile that this is; None: a single value
    load: float = attrs.field(factory=lambda: round(os.getloadavg()[0], 1))  # of the machine when measured

    @property
    def label(self) -> str:
        """Return its full name, for places where it is shown outside its row."""
        whose = f", {self.whose}" if self.whose else ""
        return f"{self.name}{whose}{'' if self.percent is None else ' ' + percentile_name(self.percent)}"

    @property
    def met(self) -> bool | None:
        if self.target is None:
            return None
        return self.value >= self.target if self.at_least else self.value <= self.target


@attrs.define
class Report:
    """The figures of one run, printed as they are measured.

    :ivar setup: the guest image and accelerator that the VMs of the benches use.
    :ivar accelerator: what QEMU used, and why, according to the daemon; "" if no bench has started VMs.
    """

    setup: Setup = attrs.field(factory=Setup)
    accelerator: str = ""
    figures: list[Figure] = attrs.field(factory=list)
    missing: dict[str, str] = attrs.field(factory=dict)  # benches that could not run, and why

    def add(
        self,
        bench: str,
        name: str,
        value: float,
        unit: str,
        target: float | None = None,
        note: str = "",
        at_least: bool = False,
        whose: str = "",
        percent: int | None = None,
    ) -> None:
        figure = Figure(bench, name, value, unit, target, note, at_least, whose, percent)
        self.figures.append(figure)
        say(f"  {figure.label}: {number(value)} {unit}")

    def latencies(
        self,
        bench: str,
        name: str,
        seconds: Sequence[float],
        percents: Sequence[int],
        targets: dict[int, float] | None = None,
        unit: str = "ms",
        note: str = "",
        whose: str = "",
    ) -> None:
        """Add percentiles of `seconds`. :param targets: in `unit`, by percent."""
        scale = {"ms": 1000.0, "s": 1.0}[unit]
        for percent in percents:
            value, target = percentile(seconds, percent) * scale, (targets or {}).get(percent)
            self.add(bench, name, value, unit, target, note, whose=whose, percent=percent)

    def table(self) -> str:
        """Format the figures, one line each, with the target and the load when the figure was measured."""
        head = ("bench", "figure", "value", "unit", "target", "", "load")
        rows = [
            (
                figure.bench,
                figure.label,
                number(figure.value),
                figure.unit,
                _target(figure),
                "" if figure.met is None else ("met" if figure.met else "MISSED"),
                f"{figure.load:.1f}",
            )
            for figure in self.figures
        ]
        widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
        lines = [f"{os.cpu_count()} processors; QEMU: {self.accelerator or 'not used'}", ""]
        lines += [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in (head, tuple("-" * width for width in widths), *rows)
        ]
        lines += [f"{bench}: {why}" for bench, why in self.missing.items()]
        return "\n".join(lines)

    def document(self) -> dict[str, object]:
        """Return everything as a JSON document, with a description of the machine."""
        return {
            "taken_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "machine": {**machine(), "accelerator": self.accelerator},
            "figures": [{**attrs.asdict(figure), "met": figure.met} for figure in self.figures],
            "missing": self.missing,
        }

    def write(self, path: Path) -> None:
        """Write the document."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.document(), indent=2) + "\n")


def percentile(values: Iterable[float], percent: float) -> float:
    """Return the smallest value that is not exceeded by `percent` of all (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def percentile_name(percent: int) -> str:
    """Return the name of a percentile."""
    return "median" if percent == 50 else f"p{percent}"


def machine() -> dict[str, object]:
    """Describe the properties of this machine that affect the figures."""
    from importlib.metadata import version

    return {
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "memory_mib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20,
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("twisted", "h2", "protobuf")},
    }


def say(text: str) -> None:
    """Print progress, which is not part of the table."""
    print(text, file=sys.stderr, flush=True)


def _target(figure: Figure) -> str:
    if figure.target is None:
        return ""
    return f"{'>=' if figure.at_least else '<='} {number(figure.target)}"


def number(value: float) -> str:
    """Return a value with its significant digits only."""
    if value >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"
