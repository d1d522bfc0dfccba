# SPDX-License-Identifier: Apache-2.0
"""The queries of the alerts and of the dashboard in contrib/."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import yaml

CONTRIB = Path(__file__).resolve().parents[2] / "contrib"
RULES = CONTRIB / "prometheus" / "infranetes-rules.yaml"
RULES_TEST = CONTRIB / "prometheus" / "infranetes-rules-test.yaml"
DASHBOARD = CONTRIB / "grafana" / "infranetes.json"

OURS = re.compile(r"\b((?:infranetes|process)_\w+)\s*(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
_BY = re.compile(r"\bby\s*\(([^)]*)\)")
OF_THE_TARGET = frozenset({"instance", "job"})  # that Prometheus gives every sample


@attrs.frozen
class Use:
    """A metric in a query, with what the query says of its labels.

    :ivar values: what it is compared with, by label. :ivar grouped: labels that it is summed by."""

    where: str
    metric: str
    values: dict[str, set[str]]
    grouped: frozenset[str]


def alerts() -> Iterator[tuple[str, str]]:
    """The name and query of each alert."""
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]


def dashboard() -> Any:  # Any: JSON
    """The dashboard."""
    return json.loads(DASHBOARD.read_text())


def panels() -> Iterator[tuple[str, str]]:
    """The panel's title and the query, for each query of the dashboard."""
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


def uses(where: str, query: str) -> Iterator[Use]:
    """What a query uses of our metrics."""
    grouped = frozenset(
        label.strip() for labels in _BY.findall(query) for label in labels.split(",") if label.strip()
    )
    for metric, matchers in OURS.findall(query):
        values = {
            label: set(value.split("|")) if "~" in kind else {value}
            for label, kind, value in _MATCHER.findall(matchers)
        }
        yield Use(where, metric, values, grouped - OF_THE_TARGET)
