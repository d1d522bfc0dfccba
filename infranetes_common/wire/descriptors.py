# SPDX-License-Identifier: Apache-2.0
"""Message classes, made from compiled descriptors when the daemon starts.

Generated ``_pb2`` modules only work with the protobuf release that wrote them. A descriptor set works with
any, so one build runs on Debian's protobuf 3.21 and on PyPI's newest.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor, FileDescriptor
from google.protobuf.message import Message

DESCRIPTOR_SET = "descriptors.binpb"

_pool = descriptor_pool.DescriptorPool()


def _load() -> None:
    blob = resources.files(__package__).joinpath(DESCRIPTOR_SET).read_bytes()
    for file in descriptor_pb2.FileDescriptorSet.FromString(blob).file:
        _pool.AddSerializedFile(file.SerializeToString())


_load()

if hasattr(message_factory, "GetMessageClass"):
    _message_class = message_factory.GetMessageClass
else:  # protobuf before 4.22
    _message_class = getattr(message_factory.MessageFactory(_pool), "GetPrototype")  # noqa: B009


def file(name: str) -> FileDescriptor:
    """Return the descriptor of a compiled ``.proto`` file, by its name in ``proto/``."""
    return _pool.FindFileByName(name)


def _add_enum(enum: EnumDescriptor, into: dict[str, object]) -> None:
    from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper

    into[enum.name] = EnumTypeWrapper(enum)
    for value in enum.values:
        into[value.name] = value.number


def _with_nested(described: Descriptor) -> type[Message]:
    """A message's class with the classes of messages in it, which protobuf before 4.22 leaves out."""
    made = message_class(described)
    for nested in described.nested_types:
        inner = _with_nested(nested)
        if not hasattr(made, nested.name) and not nested.GetOptions().map_entry:
            setattr(made, nested.name, inner)
    return made


def namespace(name: str) -> dict[str, object]:
    """Return every message class, enum, enum value and service descriptor of a file, by name."""
    described = file(name)
    found: dict[str, object] = {"DESCRIPTOR": described}
    for message in described.message_types_by_name.values():
        found[message.name] = _with_nested(message)
    for enum in described.enum_types_by_name.values():
        _add_enum(enum, found)
    for service in described.services_by_name.values():
        found[service.name] = service
    return found


def is_repeated(field: FieldDescriptor) -> bool:
    """Return whether a field is repeated; map fields are too."""
    either: Any = field  # Any: the stubs differ between releases
    if hasattr(either, "is_repeated"):
        return bool(either.is_repeated)
    return bool(either.label == either.LABEL_REPEATED)  # before 6.31


def message_class(described: Descriptor) -> type[Message]:
    """Return the Python class of a message."""
    return _message_class(described)
