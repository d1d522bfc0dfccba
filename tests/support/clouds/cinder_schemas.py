# SPDX-License-Identifier: Apache-2.0
"""Cinder's own description of its API, with which requests and the simulator's answers are checked: the JSON
schemas of requests' bodies, the filters of its lists, and the samples of its answers.

They are of Cinder's release. Its modules are executed without the rest of Cinder, of which they need two
constants. It has no schemas of answers: these have to have the fields of the samples, besides those that are
shown to administrators alone.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from types import ModuleType
from typing import Any

from jsonschema import Draft4Validator, FormatChecker

from infranetes.providers.cloud.openstack.errors import VOLUME_MICROVERSION
from tests.support.clouds import nova_schemas, wheels

RELEASE = "cinder"
_SAMPLES = "cinder/tests/functional/api_sample_tests/samples/"
_FILTERS = "cinder-{version}.data/data/etc/cinder/resource_filters.json"
_PAGING = {"marker", "limit", "sort"}
_ADMINISTRATORS = re.compile(r"migration_status|provider_id|os-vol-(?:host|mig-status)-attr:.*")
# By verb and path: a schema's module and name. An action's path ends in the action.
_REQUESTS = {
    ("POST", "/volumes"): ("volumes", "create_volume"),
    ("POST", "/volumes/ID/os-extend"): ("volume_actions", "extend"),
    ("POST", "/snapshots"): ("snapshots", "create"),
}
_LISTS = {
    "/volumes/detail": "volume",
    "/snapshots/detail": "snapshot",
    "/attachments": "attachment",
    "/messages": "message",
}
# By an answer's only field, or that field's singular: the sample. Attachments have none.
_ANSWERS = {
    "volume": "volumes/v3.48/volume-show-response",
    "snapshot": "snapshots/v3.41/snapshot-show-response",
}
_FIELDS = {
    "attachment": {"id", "status", "instance", "volume_id"},  # source: cinder/api/v3/views/attachments.py
    "message": {  # source: cinder/api/v3/views/messages.py
        *("id", "event_id", "user_message", "message_level", "created_at", "guaranteed_until"),
        *("request_id", "links", "resource_type", "resource_uuid"),
    },
}
_FORMATS = FormatChecker(formats=("uuid",))


def _is_short(most: int) -> Callable[[object], bool]:
    return lambda text: not isinstance(text, str) or len(text.strip()) <= most


for _name in ("name", "description"):
    _FORMATS.checks(f"{_name}_non_mandatory_remove_white_spaces")(_is_short(255))


@lru_cache
def _schemas() -> Mapping[str, Mapping[str, Draft4Validator]]:
    names = ("cinder", "cinder.api", "cinder.api.validation", "cinder.common", "cinder.common.constants")
    stubs: dict[str, Any] = {name: ModuleType(name) for name in names}
    constants = stubs["cinder.common"].constants = stubs["cinder.common.constants"]
    constants.DB_MAX_INT, constants.LOG_BINARIES = 0x7FFFFFFF, ()
    with zipfile.ZipFile(wheels.wheel(RELEASE)) as archive, nova_schemas.imported(stubs):
        validation = stubs["cinder.api.validation"]
        validation.parameter_types = nova_schemas.run(archive, "cinder.api.validation.parameter_types")
        modules = {module for module, _ in _REQUESTS.values()}
        return {
            module: _current(vars(nova_schemas.run(archive, f"cinder.api.schemas.{module}")))
            for module in modules
        }


def _current(found: Mapping[str, Any]) -> Mapping[str, Draft4Validator]:
    """Return a module's schemas as of VOLUME_MICROVERSION, by their names without versions."""
    minor = int(VOLUME_MICROVERSION.partition(".")[2])
    latest: dict[str, tuple[int, object]] = {}
    for name, schema in found.items():
        parts = re.fullmatch(r"([a-z_]+?)(?:_v3(\d+))?", name)
        if parts is None or name.startswith("_") or not isinstance(schema, dict):
            continue
        version = int(parts[2] or 0)
        if latest.get(parts[1], (-1, None))[0] <= version <= minor:
            latest[parts[1]] = version, schema
    return {name: Draft4Validator(schema, format_checker=_FORMATS) for name, (_, schema) in latest.items()}


@lru_cache
def _filters() -> Mapping[str, list[str]]:
    with zipfile.ZipFile(wheels.wheel(RELEASE)) as archive:
        found: dict[str, list[str]] = json.loads(
            archive.read(_FILTERS.format(version=wheels.pinned()[RELEASE]))
        )
    return found


@lru_cache
def _fields(kind: str) -> set[str]:
    if kind in _FIELDS:
        return _FIELDS[kind]
    with zipfile.ZipFile(wheels.wheel(RELEASE)) as archive:
        sample = json.loads(archive.read(f"{_SAMPLES}{_ANSWERS[kind]}.json.tpl"))[kind]
    return {field for field in sample if not _ADMINISTRATORS.fullmatch(field)}


def load() -> None:
    """Read everything, which takes long."""
    _schemas()
    _filters()
    for kind in _ANSWERS:
        _fields(kind)


def wrong_request(method: str, path: str, query: Mapping[str, str], body: Mapping[str, Any]) -> list[str]:
    """Describe what is wrong with a request."""
    path = re.sub(r"/[0-9a-f]{8}-[0-9a-f-]{27}", "/ID", path).replace(
        "/action", "".join(f"/{one}" for one in body)
    )
    if method != "POST":
        known = {*_filters()[_LISTS[path]], *_PAGING} if path in _LISTS else set[str]()
        return [f"{path}: Cinder has no filter {each}" for each in query.keys() - known]
    judge = _REQUESTS.get((method, path))
    if judge is None:
        return [f"{method} {path}: nothing says what its body may have"]
    errors = _schemas()[judge[0]][judge[1]].iter_errors(body)
    return [f"{path}: {'.'.join(map(str, each.path))}: {each.message[:200]}" for each in errors]


def wrong_answer(answer: Mapping[str, Any] | None) -> list[str]:
    """Describe what is wrong with an answer."""
    return [
        f"{kind}: {', '.join(sorted(_fields(kind) ^ set(one)))}: not as in Cinder's sample"
        for kind, one in _resources(answer or {})
        if set(one) != _fields(kind)
    ]


def _resources(answer: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name, value in answer.items():
        kind = name if isinstance(value, dict) else name.removesuffix("s")
        if kind in _ANSWERS or kind in _FIELDS:
            for one in [value] if isinstance(value, dict) else value:
                yield kind, one
