# SPDX-License-Identifier: Apache-2.0
"""Nova's own JSON schemas, with which requests and the simulator's answers are checked.

They are Python modules of Nova's release. They are executed without the rest of Nova, from which they need
three constants.
"""

from __future__ import annotations

import base64
import binascii
import re
import sys
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from functools import lru_cache
from types import ModuleType
from typing import Any

import attrs
from jsonschema import Draft4Validator, FormatChecker

from infranetes.providers.cloud.openstack.errors import MICROVERSION
from tests.support.clouds import wheels

RELEASE = "nova"
_SCHEMAS = "nova.api.openstack.compute.schemas"
_MODULES = (
    "servers", "flavors", "console_output", "availability_zone", "volume_attachments", "server_metadata",
)  # fmt: skip
# By verb and path: a schema's module, and its names for requests and answers.
_JUDGES = {
    ("GET", "/servers/detail"): ("servers", "index_query", "detail_response"),
    ("GET", "/flavors/detail"): ("flavors", "index_query", "detail_response"),
    ("GET", "/os-availability-zone"): ("availability_zone", "index_query", "index_response"),
    ("POST", "/servers"): ("servers", "create", "create_response"),
    ("GET", "/servers/ID"): ("servers", "show_query", "show_response"),
    ("POST", "/servers/ID/os-volume_attachments"): ("volume_attachments", "create", "create_response"),
    ("POST", "/servers/ID/metadata"): ("server_metadata", "create", "create_response"),
    ("POST", "/servers/ID/action"): ("console_output", "get_console_output", "get_console_output_response"),
}
_SAMPLES = "nova/tests/functional/api_sample_tests/api_samples/"
FORMATS = FormatChecker(formats=("ipv4", "ipv6", "uuid", "regex"))


def _is_base64(text: object) -> bool:
    return not isinstance(text, str) or bool(base64.b64decode(text, validate=True))


def _is_time(text: object) -> bool:
    """Return whether it is a time that Nova accepts, which may lack a time zone."""
    return not isinstance(text, str) or bool(datetime.fromisoformat(text))


FORMATS.checks("base64", raises=(binascii.Error, ValueError))(_is_base64)
FORMATS.checks("date-time", raises=ValueError)(_is_time)


def _stubs() -> dict[str, ModuleType]:
    """Return what the schemas import from the rest of Nova."""
    names = ["nova", "nova.i18n", "nova.objects", "nova.objects.instance", "nova.objects.tag", "nova.api"]
    stubs = {name: ModuleType(name) for name in (*names, "nova.api.validation")}
    stubs["nova.i18n"]._ = str  # type: ignore[attr-defined]
    stubs["nova.objects.instance"].MAX_TAG_COUNT = 50  # type: ignore[attr-defined]
    stubs["nova.objects.tag"].MAX_TAG_LENGTH = 60  # type: ignore[attr-defined]
    for name, module in stubs.items():
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(stubs[parent], last, module)
    return stubs


@contextmanager
def imported(modules: Mapping[str, ModuleType]) -> Iterator[None]:
    """Replace modules with these names by these ones."""
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def run(archive: zipfile.ZipFile, name: str) -> ModuleType:
    """Run a module of a wheel."""
    module = ModuleType(name)
    source = archive.read(f"{name.replace('.', '/')}.py")
    exec(compile(source, name, "exec"), module.__dict__)  # noqa: S102  a pinned release's own constants
    return module


@lru_cache
def schemas() -> Schemas:
    """Return the schemas of the API version that we request. The first call takes long."""
    stubs = _stubs()
    with zipfile.ZipFile(wheels.wheel(RELEASE)) as archive, imported(stubs):
        for name in ("parameter_types", "response_types"):
            setattr(stubs["nova.api.validation"], name, run(archive, f"nova.api.validation.{name}"))
        modules = {name: run(archive, f"{_SCHEMAS}.{name}") for name in _MODULES}
    return Schemas({name: _current(vars(module)) for name, module in modules.items()})


def _current(found: Mapping[str, Any]) -> Mapping[str, Draft4Validator]:
    """Return a module's schemas as of MICROVERSION, by their names without versions."""
    minor = int(MICROVERSION.partition(".")[2])
    latest: dict[str, tuple[int, object]] = {}
    for name, schema in found.items():
        parts = re.fullmatch(r"([a-z_]+?)(?:_v2(\d+))?", name)
        if parts is None or name.startswith("_") or not isinstance(schema, dict):
            continue
        version = int(parts[2] or 0)
        if version <= minor and version >= latest.get(parts[1], (-1, None))[0]:
            latest[parts[1]] = version, schema
    return {name: Draft4Validator(schema, format_checker=FORMATS) for name, (_, schema) in latest.items()}


@attrs.frozen
class Schemas:
    """Schemas by their modules and names."""

    modules: Mapping[str, Mapping[str, Draft4Validator]]

    def wrong(self, module: str, name: str, value: object) -> list[str]:
        """Describe what is wrong with a body, query or answer."""
        errors = self.modules[module][name].iter_errors(value)
        return [f"{module}.{name}: {'.'.join(map(str, each.path))}: {each.message[:200]}" for each in errors]

    def wrong_request(self, method: str, path: str, query: Mapping[str, str], body: object) -> list[str]:
        """Describe what is wrong with a request."""
        for action in ("os-stop", "os-start"):
            if isinstance(body, dict) and action in body:
                return [] if body == {action: None} else [f"{action}: it has no parameters"]
        value = body if method == "POST" else {key: [each] for key, each in query.items()}
        known = _judge(method, path)
        return self.wrong(known[0], known[1], value) if known else []

    def wrong_answer(self, method: str, path: str, answer: object) -> list[str]:
        """Describe what is wrong with an answer."""
        known = _judge(method, path)
        return self.wrong(known[0], known[2], answer) if known and answer is not None else []


def _judge(method: str, path: str) -> tuple[str, str, str] | None:
    """Return the schemas of a request; None: neither it nor its answer has a body."""
    return _JUDGES.get((method, re.sub(r"^/servers/[0-9a-f-]{36}", "/servers/ID", path)))


def sample(name: str) -> str:
    """Return one of Nova's samples of its API, with placeholders: `servers/v2.63/server-get-resp`."""
    with zipfile.ZipFile(wheels.wheel(RELEASE)) as archive:
        return archive.read(f"{_SAMPLES}{name}.json.tpl").decode()
