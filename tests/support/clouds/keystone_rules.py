# SPDX-License-Identifier: Apache-2.0
"""Checks requests for tokens by Keystone's own schema, and calls by the manual's access rules of an
application credential (source: Keystone user guide, "Application credentials", "Access rules").

The schema is from Keystone's release.
"""

from __future__ import annotations

import json
import re
import zipfile
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from jsonschema import Draft4Validator

from tests.support.clouds import nova_schemas, wheels

RELEASE = "keystone"
RULES = Path(__file__).resolve().parents[3] / "docs" / "provider-openstack-access-rules.json"


@lru_cache
def _schema() -> Draft4Validator:
    names = ("keystone", "keystone.common", "keystone.common.validation", "keystone.i18n")
    stubs: dict[str, Any] = {name: ModuleType(name) for name in names}
    stubs["keystone"].exception = None
    stubs["keystone.i18n"]._ = str
    stubs["keystone.common"].validation = stubs["keystone.common.validation"]
    stubs["keystone.common.validation"].parameter_types = types = ModuleType("parameter_types")
    types.boolean = {"type": "boolean"}  # type: ignore[attr-defined]
    with zipfile.ZipFile(wheels.wheel(RELEASE)) as archive, nova_schemas.imported(stubs):
        return Draft4Validator(nova_schemas.run(archive, "keystone.auth.schema").token_issue)


def wrong(body: dict[str, Any]) -> list[str]:
    """Describe what is wrong with a request for a token."""
    return [f"a token: {each.message[:200]}" for each in _schema().iter_errors(body["auth"])]


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
