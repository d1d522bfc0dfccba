# SPDX-License-Identifier: Apache-2.0
"""Configuration classes as the keys that a person writes."""

from __future__ import annotations

import re

import attrs

from infranetes_common.config_reference import rows, section
from infranetes_common.config_text import settings


def defaults(config: attrs.AttrsInstance, prefix: str = "") -> dict[str, str]:
    """Every dotted key of an instance of a configuration class that has its defaults, with its default
    in TOML; of a class that has to be given: "" for what it requires."""
    return {each.key: "" if each.value == {} else each.text for each in settings(config, prefix)}


def documented(text: str, heading: str) -> dict[str, str]:
    """Key and default of each row of the tables below a `## heading`: | `key` | `default` | words |."""
    keys = re.findall(r"^\| `([^`]+)` \|", section(text, heading), flags=re.M)
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise AssertionError(f"{heading}: {', '.join(twice)}: more than once")
    return {key: row.default for key, row in rows(text, heading).items()}
