"""Message classes made from compiled descriptors when the daemon starts.

Generated ``_pb2`` modules are bound to the protobuf release that wrote them; a descriptor set is
not, so one build runs on Debian's protobuf 3.21 and on the newest of PyPI alike.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor, FileDescriptor

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
    """The descriptor of one compiled ``.proto`` file, by its name in ``proto/``."""
    return _pool.FindFileByName(name)


def _enum_members(enum: Any, into: dict[str, Any]) -> None:
    from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper

    into[enum.name] = EnumTypeWrapper(enum)
    for value in enum.values:
        into[value.name] = value.number


def namespace(name: str) -> dict[str, Any]:
    """Every message class, enum, enum value and service descriptor of one file, by name."""
    described = file(name)
    found: dict[str, Any] = {"DESCRIPTOR": described}
    for message in described.message_types_by_name.values():
        found[message.name] = message_class(message)
    for enum in described.enum_types_by_name.values():
        _enum_members(enum, found)
    for service in described.services_by_name.values():
        found[service.name] = service
    return found


def message_class(described: Descriptor) -> Any:
    """The Python class of one message."""
    return _message_class(described)
