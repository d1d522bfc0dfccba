# SPDX-License-Identifier: Apache-2.0
"""AWS' own model of EC2's API, by which requests are validated.

It is from the release of botocore that moto uses, because Debian's is older than some requests here. A
request's form is turned back into the structure that it was made from, which botocore then validates.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from botocore.model import ListShape, Shape, StructureShape
from botocore.model import ServiceModel as Model
from botocore.validate import ParamValidator

from tests.support.clouds.agent_processes import ROOT

_MODEL = "botocore/data/ec2/2016-11-15/service-2.json.gz"
_COMMON = {"Action", "Version"}  # of every request
_INTEGER = re.compile(r"-?[0-9]+")
_MEMBER = re.compile(r"[1-9][0-9]*")

Form = Mapping[str, str]


@lru_cache
def model() -> Model:
    """Return the model. The first call takes long."""
    return Model(json.loads(gzip.decompress(_file().read_bytes())), "ec2")


def _file() -> Path:
    for packages in (ROOT / ".venv" / "lib").glob("python3*/site-packages"):
        if (packages / _MODEL).exists():
            return packages / _MODEL
    found = find_spec("botocore")
    assert found is not None and found.origin is not None
    return Path(found.origin).parent.parent / _MODEL


def wrong(form: Form) -> list[str]:
    """Describe what is wrong with a request."""
    action = form.get("Action", "")
    if action not in model().operation_names:
        return [f"no action is called {action!r}"]
    shape = model().operation_model(action).input_shape
    found: list[str] = []
    fields = {name: value for name, value in form.items() if name not in _COMMON}
    structure = _structure(shape, fields, "", found) if shape is not None else {}
    if shape is not None and not found:
        report = ParamValidator().validate(structure, shape)
        found += report.generate_report().splitlines()
    return [f"{action}: {words}" for words in found]


def _structure(shape: StructureShape, fields: Form, path: str, found: list[str]) -> dict[str, Any]:
    names = {_name(name, member): name for name, member in shape.members.items()}
    made: dict[str, Any] = {}
    for name, inner in _groups(fields):
        if name not in names:
            found.append(f"{path or 'the request'} has no parameter {name}")
        else:
            made[names[name]] = _value(shape.members[names[name]], inner, f"{path}{name}", found)
    return made


def _value(shape: Shape, fields: Form, path: str, found: list[str]) -> Any:
    if isinstance(shape, StructureShape):
        return _structure(shape, fields, f"{path}.", found)
    if isinstance(shape, ListShape):
        groups = dict(_groups(fields))
        if not all(_MEMBER.fullmatch(number) for number in groups):
            found.append(f"{path} is a list, whose members have numbers, not {', '.join(groups)}")
            return []
        if sorted(map(int, groups)) != list(range(1, len(groups) + 1)):
            found.append(f"{path}'s members are {', '.join(groups)}")
        return [_value(shape.member, inner, f"{path}.{number}", found) for number, inner in groups.items()]
    if set(fields) != {""}:
        found.append(f"{path} has no parts {', '.join(filter(None, fields))}")
        return None
    return _scalar(shape, fields[""], path, found)


def _scalar(shape: Shape, text: str, path: str, found: list[str]) -> Any:
    kind = shape.type_name
    if kind == "boolean" and text in ("true", "false"):
        return text == "true"
    if kind in ("integer", "long") and _INTEGER.fullmatch(text):
        return int(text)
    if kind in ("float", "double"):
        try:
            return float(text)
        except ValueError:
            pass
    if kind in ("boolean", "integer", "long", "float", "double"):
        found.append(f"{path} is no {kind}: {text[:80]}")
    elif kind == "string" and shape.enum and text not in shape.enum:
        found.append(f"{path} can't be {text[:80]}")
    return text


def _name(name: str, shape: Shape) -> str:
    """A member's name in requests, as botocore's serializer for EC2 has it."""
    given = shape.serialization
    if "queryName" in given:
        return str(given["queryName"])
    named = str(given.get("name", name))
    return named[0].upper() + named[1:]


def _groups(fields: Form) -> Iterator[tuple[str, dict[str, str]]]:
    """Fields by the first part of their names, each with the rest of its name."""
    groups: dict[str, dict[str, str]] = {}
    for name, value in fields.items():
        first, _, rest = name.partition(".")
        groups.setdefault(first, {})[rest] = value
    yield from groups.items()
