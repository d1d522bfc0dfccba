# SPDX-License-Identifier: Apache-2.0
"""Azure's own models of its API, with which requests and answers are checked.

They are in the releases of Azure's libraries for Python, which are generated from Azure's published
specifications. Both are read as text: nothing of them is imported.
"""

from __future__ import annotations

import ast
import re
import zipfile
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import attrs

from tests.support.clouds import wheels

COMPUTE, NETWORK = "azure-mgmt-compute", "azure-mgmt-network"
_COMPUTE_GROUPS = (
    "virtual_machines",
    "disks",
    "snapshots",
    "gallery_images",
    "gallery_image_versions",
    "resource_skus",
)
_NETWORK_GROUPS = ("network_interfaces_", "public_ip_addresses_", "subnets_")
# The models of the resource at a path, and of the list that it is in.
_RESOURCES: Mapping[str, tuple[str, str, str]] = {
    "virtualMachines": (COMPUTE, "VirtualMachine", "VirtualMachineListResult"),
    "disks": (COMPUTE, "Disk", "DiskList"),
    "snapshots": (COMPUTE, "Snapshot", "SnapshotList"),
    "images": (COMPUTE, "GalleryImage", "GalleryImageList"),
    "versions": (COMPUTE, "GalleryImageVersion", "GalleryImageVersionList"),
    "skus": (COMPUTE, "", "ResourceSkusResult"),
    "retrieveBootDiagnosticsData": (COMPUTE, "", "RetrieveBootDiagnosticsDataResult"),
    "networkInterfaces": (NETWORK, "NetworkInterface", "NetworkInterfaceListResult"),
    "publicIPAddresses": (NETWORK, "PublicIPAddress", "PublicIPAddressListResult"),
    "subnets": (NETWORK, "Subnet", ""),
}
_POSTED = {"attachDetachDataDisks": "AttachDetachDataDisksRequest"}  # models of actions' bodies
_GROWING = ("vmSize",)  # its known values are those of 2016
_TYPES: Mapping[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "iso-8601": (str,),
    "duration": (str,),
}
Json = Any
"""A body, or a part of one. Any: its model says what is in it."""


@attrs.frozen
class Operation:
    """A request that Azure serves.

    :ivar path: a pattern. :ivar query: its parameters, with the values of those that can have one only."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: frozenset[str]


@attrs.frozen
class Model:
    """A model: the attributes of a resource by their paths, and rules for them by the same."""

    types: Mapping[tuple[str, ...], str]
    rules: Mapping[tuple[str, ...], Mapping[str, Any]]  # Any: of each rule's own type
    values: Mapping[tuple[str, ...], frozenset[str]]  # of enumerations


class _Library:
    """One of Azure's libraries."""

    def __init__(self, name: str, files: tuple[str, ...], groups: tuple[str, ...]) -> None:
        with zipfile.ZipFile(wheels.wheel(name)) as archive:
            package = f"azure/mgmt/{'compute' if name == COMPUTE else 'network'}"
            self._models = archive.read(f"{package}/models/_models_py3.py").decode()
            texts = [archive.read(f"{package}/operations/{file}.py").decode() for file in files]
        self.operations = [each for text in texts for each in _operations(text, groups)]
        self._read: dict[str, Model] = {}

    def model(self, name: str) -> Model | None:
        """Return a model; None: there is no model of that name."""
        if name not in self._read:
            begin = re.search(rf"^class {name}\(([\w.]+)", self._models, re.MULTILINE)
            if begin is None:
                return None
            text = self._models[begin.start() : self._models.find("\nclass ", begin.end())]
            above = None if "_attribute_map = " in text else self.model(begin[1])
            self._read[name] = above or _model(text)
        return self._read[name]


def _operations(text: str, groups: tuple[str, ...]) -> Iterator[Operation]:
    """Yield the operations whose names begin with one of `groups`."""
    for part in text.split("\ndef build_")[1:]:
        if not part.startswith(groups):
            continue
        url = re.search(r'"template_url",\s*"([^"]+)"', part) or re.search(r'_url = "([^"]+)"', part)
        method = re.search(r'HttpRequest\(method="(\w+)"', part)
        if url is None or method is None:
            continue
        fixed = dict(re.findall(r'_params\.pop\("([\w-]+)", "([^"]+)"\)', part))
        names = re.findall(r'_params\["([^"]+)"\] =', part)
        headers = {each.lower() for each in re.findall(r'_headers\["([^"]+)"\] =', part)}
        path = re.sub(r"\{\w+\}", "[^/]+", url[1].replace(".", r"\."))
        yield Operation(method[1], path, {name: fixed.get(name, "") for name in names}, frozenset(headers))


def _model(text: str) -> Model:
    attributes = _literal(text, "_attribute_map")
    rules, paths = _literal(text, "_validation"), {}
    for name, each in attributes.items():
        paths[name] = tuple(part.replace("\\.", ".") for part in re.split(r"(?<!\\)\.", each["key"]))
    known = {
        said.partition(":")[0]: said.partition(":vartype")[0].partition("Known values are:")[2]
        for said in text.split(":ivar ")[1:]
    }
    return Model(
        {paths[name]: each["type"] for name, each in attributes.items()},
        {paths[name]: each for name, each in rules.items() if name in paths},
        {paths[name]: frozenset(re.findall(r'"([^"]+)"', said)) for name, said in known.items() if said},
    )


def _literal(text: str, name: str) -> Any:
    found = re.search(rf"^    {name} = (\{{.*?^    \}})", text, re.MULTILINE | re.DOTALL)
    return ast.literal_eval(found[1]) if found else {}


class Api:
    """Azure's API, by its models."""

    def __init__(self) -> None:
        self._libraries = {
            COMPUTE: _Library(COMPUTE, tuple(f"_{each}_operations" for each in _COMPUTE_GROUPS), ("",)),
            NETWORK: _Library(NETWORK, ("_operations",), _NETWORK_GROUPS),
        }

    def wrong_request(
        self, method: str, path: str, query: Mapping[str, str], headers: Mapping[str, str], body: Json
    ) -> list[str]:
        """Describe what is wrong with a request. :param headers: those that are the request's own."""
        served = [
            each
            for library in self._libraries.values()
            for each in library.operations
            if each.method == method and re.fullmatch(each.path, path)
        ]
        if not served:
            return [f"nothing is served at {method} {path}"]
        found = [*_query(served[0], query)]
        found += [f"no header is called {name}" for name in headers if name.lower() not in served[0].headers]
        if method == "PUT":
            library, item, _ = _RESOURCES[_kind(path)]
            found += self._object(library, item, "the body", body, False)
        elif method == "PATCH":
            library, item, _ = _RESOURCES[_kind(path)]
            found += self._object(library, f"{item}Update", "the body", body, False)
        elif (action := path.rpartition("/")[2]) in _POSTED:
            found += self._object(COMPUTE, _POSTED[action], "the body", body, False)
        elif body:
            found.append("it takes no body")
        return [f"{method} {path}: {words}" for words in found]

    def wrong_answer(self, method: str, path: str, answer: Json) -> list[str]:
        """Describe what is wrong with an answer that is not an error."""
        library, item, listed = _RESOURCES[_kind(path)]
        name = item if item and _is_item(path) else listed
        found = self._object(library, name, "the answer", answer, True)
        return [f"{method} {path}: {words}" for words in found]

    def _object(self, library: str, name: str, where: str, value: Json, answered: bool) -> Iterator[str]:
        """Describe what is wrong with an object of the model of that name."""
        model = self._libraries[library].model(name)
        if model is None:
            raise KeyError(f"{library} has no model {name}")
        if not isinstance(value, dict):
            yield f"{where} is of type {type(value).__name__}, not {name}"
            return
        given = dict(_leaves(value, model))
        for path, each in given.items():
            here = f"{where}.{'.'.join(path)}"
            if path not in model.types:
                yield f"{here} is nothing that {name} has"
            elif model.rules.get(path, {}).get("readonly") and not answered:
                yield f"{here} is what Azure says, not what is asked for"
            elif each is not None:
                yield from _rules(here, model, path, each)
                yield from self._value(library, model.types[path], here, each, answered)
        for path, rules in model.rules.items():
            if rules.get("required") and given.get(path) is None:
                yield f"{where} lacks {'.'.join(path)}"

    def _value(self, library: str, kind: str, where: str, value: Json, answered: bool) -> Iterator[str]:
        if kind in ("object", "bytearray"):
            return
        if kind in _TYPES:
            if type(value) not in _TYPES[kind]:
                yield f"{where} is of type {type(value).__name__}, not {kind}"
        elif kind[0] in "[{":
            if type(value) is not (list if kind[0] == "[" else dict):
                yield f"{where} is of type {type(value).__name__}, not {kind}"
                return
            for each in value if kind[0] == "[" else value.values():
                yield from self._value(library, kind[1:-1], f"{where}[]", each, answered)
        else:
            yield from self._object(library, kind, where, value, answered)


def _leaves(value: Json, model: Model, above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Json]]:
    """Yield the attributes of an object by their paths in its model, such as `properties.NAME`."""
    for name, each in value.items():
        path = (*above, name)
        is_inside = path not in model.types and any(known[: len(path)] == path for known in model.types)
        if is_inside and isinstance(each, dict):
            yield from _leaves(each, model, path)
        else:
            yield path, each


def _rules(where: str, model: Model, path: tuple[str, ...], value: Json) -> Iterator[str]:
    rules, values = model.rules.get(path, {}), model.values.get(path)
    if values and isinstance(value, str) and value not in values and path[-1] not in _GROWING:
        yield f"{where} can't be {value}"
    pattern = rules.get("pattern")
    if pattern and not re.search(pattern, str(value)):
        yield f"{where} does not match {pattern}: {value}"
    if "max_length" in rules and len(value) > rules["max_length"]:
        yield f"{where} is too long"


def _query(operation: Operation, query: Mapping[str, str]) -> Iterator[str]:
    for name, value in query.items():
        if name == "$skiptoken":  # links to further pages have it
            continue
        if name not in operation.query:
            yield f"no parameter is called {name}"
        elif operation.query[name] and operation.query[name] != value:
            yield f"{name} is {value}, and {operation.query[name]} is described"
    for name, value in operation.query.items():
        if value and name not in query:
            yield f"{name} is missing"


def _kind(path: str) -> str:
    """Return the kind of the resource at a path, as in _RESOURCES."""
    return next(part for part in reversed(path.split("/")) if part in _RESOURCES)


def _is_item(path: str) -> bool:
    return path.rpartition("/")[2] not in _RESOURCES


@lru_cache
def api() -> Api:
    """Return Azure's API. The first call takes long."""
    return Api()
