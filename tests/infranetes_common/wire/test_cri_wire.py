# SPDX-License-Identifier: Apache-2.0
"""The CRI's messages are on the wire what everybody else's are.

``cri-api-v1.json`` has the names, numbers and types of CRI API v1, written down apart from
``proto/cri.proto``.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto, MethodDescriptorProto
from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.wire import descriptors

FACTS = Path(__file__).with_name("cri-api-v1.json")
SHARED = Path(__file__).resolve().parents[4] / "shared" / "cri" / FACTS.name

Facts = dict[str, Any]

SCALARS = {
    getattr(FieldDescriptor, f"TYPE_{name.upper()}"): name
    for name in ("string", "bytes", "bool", "double", "float", "int32", "int64", "uint32", "uint64")
}


def local_name(described: Any) -> str:
    """A message's or enum's name without the package."""
    name: str = described.full_name
    return name.removeprefix(f"{described.file.package}.")


def is_repeated(field: Any) -> bool:
    """protobuf 3.21 has only `label`, the newest only `is_repeated`."""
    return bool(field.is_repeated) if hasattr(field, "is_repeated") else field.label == field.LABEL_REPEATED


def type_name(field: FieldDescriptor) -> str:
    """A field's type as the facts word it."""
    if field.message_type is not None:
        if field.message_type.GetOptions().map_entry:
            key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
            return f"map<{type_name(key)},{type_name(value)}>"
        return local_name(field.message_type)
    if field.enum_type is not None:
        return local_name(field.enum_type)
    return SCALARS[field.type]


def field_facts(field: FieldDescriptor) -> Facts:
    """One field."""
    found: Facts = {"name": field.name, "number": field.number, "type": type_name(field)}
    if is_repeated(field) and not found["type"].startswith("map<"):
        found["repeated"] = True
    if field.GetOptions().deprecated:
        found["deprecated"] = True
    if field.containing_oneof is not None:
        found["oneof"] = field.containing_oneof.name
    return found


def message_facts(message: Descriptor, into: Facts) -> None:
    """One message and those in it."""
    fields = sorted(message.fields, key=lambda field: field.number)
    into["messages"][local_name(message)] = {"fields": [field_facts(field) for field in fields]}
    for enum in message.enum_types:
        into["enums"][local_name(enum)] = {value.name: value.number for value in enum.values}
    for nested in message.nested_types:
        if not nested.GetOptions().map_entry:
            message_facts(nested, into)


def file_facts(file: FileDescriptor) -> Facts:
    """A whole file, in the form of the facts."""
    found: Facts = {"package": file.package, "enums": {}, "messages": {}, "services": {}}
    for enum in file.enum_types_by_name.values():
        found["enums"][enum.name] = {value.name: value.number for value in enum.values}
    for message in file.message_types_by_name.values():
        message_facts(message, found)
    for service in file.services_by_name.values():
        found["services"][service.name] = methods = {}
        for method in service.methods:
            rpc: Facts = {
                "request": local_name(method.input_type),
                "response": local_name(method.output_type),
            }
            proto = MethodDescriptorProto()  # protobuf 3.21 tells of streaming in no other way
            method.CopyToProto(proto)
            if proto.client_streaming:
                rpc["client_streaming"] = True
            if proto.server_streaming:
                rpc["server_streaming"] = True
            methods[method.name] = rpc
    return found


def read(path: Path) -> Facts:
    """Facts, with fields in the order of their numbers."""
    facts: Facts = json.loads(path.read_text())
    for message in facts["messages"].values():
        message["fields"].sort(key=lambda field: field["number"])
    return facts


def differences(ours: Any, theirs: Any, where: str = "") -> list[str]:
    """Each place where the two are not equal, in words."""
    if isinstance(ours, list) and isinstance(theirs, list):
        ours, theirs = ({item["name"]: item for item in items} for items in (ours, theirs))
    if not (isinstance(ours, dict) and isinstance(theirs, dict)):
        return [] if ours == theirs else [f"{where}: ours is {ours!r}, theirs {theirs!r}"]
    found = [f"{where}.{key}: only ours" for key in ours.keys() - theirs.keys()]
    found += [f"{where}.{key}: only theirs" for key in theirs.keys() - ours.keys()]
    for key in ours.keys() & theirs.keys():
        found += differences(ours[key], theirs[key], f"{where}.{key}")
    return sorted(found)


class WireTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.ours = file_facts(descriptors.file("cri.proto"))
        self.theirs = read(FACTS)

    def test_every_message_enum_and_service_is_the_cris(self) -> None:
        theirs = {key: self.theirs[key] for key in self.ours}
        self.assertEqual(differences(self.ours, theirs), [])

    def test_all_are_there(self) -> None:
        rpcs = [name for service in self.ours["services"].values() for name in service]
        self.assertEqual((len(self.ours["messages"]), len(self.ours["enums"]), len(rpcs)), (170, 11, 41))

    def test_it_is_proto3(self) -> None:
        whole = FileDescriptorProto()
        descriptors.file("cri.proto").CopyToProto(whole)
        self.assertEqual(whole.syntax, self.theirs["syntax"])

    def test_the_facts_are_those_of_the_design(self) -> None:
        if SHARED.parent.parent.exists():  # a checkout beside the project's shared papers
            self.assertEqual(json.loads(FACTS.read_text()), json.loads(SHARED.read_text()))


class DifferenceTests(SynchronousTestCase):
    """The comparison sees every kind of difference."""

    def changed(self, *path: Any, to: Any) -> list[str]:
        facts = file_facts(descriptors.file("cri.proto"))
        other = copy.deepcopy(facts)
        inner: Any = other
        for step in path[:-1]:
            inner = inner[step]
        if to is None:
            del inner[path[-1]]
        else:
            inner[path[-1]] = to
        return differences(facts, other)

    def test_in_a_field(self) -> None:
        field = ("messages", "ContainerStatus", "fields", 0)
        for key, to in (("number", 99), ("type", "bytes"), ("repeated", True), ("deprecated", True)):
            found = self.changed(*field, key, to=to)
            self.assertEqual(len(found), 1)
            self.assertTrue(found[0].startswith(f".messages.ContainerStatus.fields.id.{key}:"), found)

    def test_in_a_name(self) -> None:
        self.assertEqual(
            self.changed("messages", "PodIP", "fields", 0, "name", to="address"),
            [".messages.PodIP.fields.address: only theirs", ".messages.PodIP.fields.ip: only ours"],
        )

    def test_in_what_is_there(self) -> None:
        self.assertEqual(self.changed("messages", "PodIP", to=None), [".messages.PodIP: only ours"])
        self.assertEqual(self.changed("messages", "New", to={"fields": []}), [".messages.New: only theirs"])
        self.assertEqual(
            self.changed("enums", "Protocol", "SCTP", to=None), [".enums.Protocol.SCTP: only ours"]
        )

    def test_in_a_method(self) -> None:
        method = ("services", "RuntimeService", "GetContainerEvents")
        self.assertEqual(len(self.changed(*method, "server_streaming", to=None)), 1)
        self.assertEqual(len(self.changed(*method, "request", to="VersionRequest")), 1)
        self.assertEqual(len(self.changed(*method, to=None)), 1)
