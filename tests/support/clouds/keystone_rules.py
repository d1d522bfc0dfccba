# SPDX-License-Identifier: Apache-2.0
"""What an application credential with the manual's access rules may call (source: Keystone user guide,
"Application credentials", "Access rules")."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from pathlib import Path

RULES = Path(__file__).resolve().parents[3] / "docs" / "provider-openstack-access-rules.json"


@lru_cache
def _rules() -> list[tuple[str, str, re.Pattern[str]]]:
    return [
        (each["service"], each["method"], _pattern(each["path"])) for each in json.loads(RULES.read_text())
    ]


def _pattern(path: str) -> re.Pattern[str]:
    """`*` stands for one part of a path, `**` for any number of them."""
    parts = re.split(r"(\*\*|\*)", path)
    return re.compile("".join({"**": ".*", "*": "[^/]+"}.get(part, re.escape(part)) for part in parts))


def allows(service: str, method: str, path: str) -> bool:
    """Whether a rule allows a request."""
    return any((service, method) == rule[:2] and rule[2].fullmatch(path) is not None for rule in _rules())
