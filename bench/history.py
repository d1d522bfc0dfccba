# SPDX-License-Identifier: Apache-2.0
"""The last runs of the benches, in one file beside the JSON of the latest."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from bench.figures import Figure

RUNS = 20
Document = Mapping[str, Any]  # Any: JSON
"""One run as `Report.document` makes it, read from JSON."""


def beside(path: Path) -> Path:
    """Return the path of the history that belongs to the run at `path`."""
    return path.with_name(f"{path.stem}-history{path.suffix}")


def add(path: Path, run: Document) -> list[Document]:
    """Add a run to the history at `path`, drop the oldest if there are too many, and return the history."""
    runs = [*(read(path) if path.exists() else ()), run][-RUNS:]
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps({"runs": runs}) + "\n")
    new.replace(path)
    return runs


def read(path: Path) -> list[Document]:
    """Read a history, or a single run; the oldest comes first. :raise ValueError: it is neither."""
    document = json.loads(path.read_text())
    runs = document.get("runs", [document]) if isinstance(document, dict) else None
    if not isinstance(runs, list) or not all(isinstance(each, dict) and "figures" in each for each in runs):
        raise ValueError(f"{path} has no figures: it was not written by python -m bench --json")
    return runs


def figures(run: Document) -> Sequence[Figure]:
    """Return the figures of a run. Fields that this release does not know are left out."""
    known = {field.name for field in attrs.fields(Figure)}
    return [
        Figure(**{"load": math.nan, **{key: value for key, value in each.items() if key in known}})
        for each in run["figures"]
    ]
