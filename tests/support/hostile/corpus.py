# SPDX-License-Identifier: Apache-2.0
"""Hypothesis strategies for messages of any shape that the protocol can carry."""

from __future__ import annotations

import functools
from typing import Any, TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

from infranetes_common.wire import vmserver
from infranetes_common.wire.descriptors import is_repeated, message_class

T = TypeVar("T")
_INTEGERS = {
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.TYPE_ENUM: (-(2**31), 2**31 - 1),
}
_UNKNOWN = b"\xfa\x7f\x03xxx"  # an unknown field


def responses(method: str) -> st.SearchStrategy[bytes]:
    """Responses of one of the agent's methods, as bytes on the wire, some of which are not valid messages."""
    whole = messages(vmserver.Agent.methods_by_name[method].output_type)
    serialized = whole.map(lambda one: bytes(one.SerializeToString()))
    mangled = st.tuples(serialized, st.binary(max_size=20), st.integers(0, 200)).map(
        lambda parts: parts[0][: parts[2]] + parts[1] + parts[0][parts[2] :]
    )
    return st.one_of(serialized, serialized.map(lambda data: data + _UNKNOWN), mangled)


@functools.cache
def messages(descriptor: Descriptor) -> st.SearchStrategy[Message]:
    """Messages with any of their fields set to any value."""
    made = message_class(descriptor)
    fields = {field.name: _field(field) for field in descriptor.fields if not _is_map(field)}
    maps = {
        field.name: st.dictionaries(_text(), _text(), max_size=40)
        for field in descriptor.fields
        if _is_map(field)
    }
    oneofs = {one.name: [field.name for field in one.fields] for one in descriptor.oneofs}

    def build(chosen: dict[str, Any]) -> Message:  # Any: values of fields
        for names in oneofs.values():
            for name in [one for one in names if one in chosen][1:]:
                del chosen[name]
        return made(**chosen)

    return st.fixed_dictionaries({}, optional={**fields, **maps}).map(build)


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


def _field(field: FieldDescriptor) -> st.SearchStrategy[Any]:  # Any: a value of the field
    if field.message_type is not None:
        one: st.SearchStrategy[Any] = messages(field.message_type)
    elif field.type == FieldDescriptor.TYPE_STRING:
        one = _text()
    elif field.type == FieldDescriptor.TYPE_BYTES:
        one = st.one_of(
            st.binary(max_size=40), st.sampled_from([b"\n" * 16384, b"x" * 20000, b"a/../b", b"\0"])
        )
    elif field.type == FieldDescriptor.TYPE_BOOL:
        one = st.booleans()
    elif field.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
        one = st.floats()
    else:
        low, high = _INTEGERS[field.type]
        one = st.one_of(st.sampled_from([low, -1 if low else 0, 0, 1, high]), st.integers(low, high))
    if not is_repeated(field):
        return one
    return st.one_of(st.lists(one, max_size=3), st.tuples(one, st.sampled_from([64, 300])).map(_many))


def _many(drawn: tuple[T, int]) -> list[T]:
    """Repeat a value, unless that would take MiBs."""
    one, count = drawn
    size = one.ByteSize() if hasattr(one, "ByteSize") else len(str(one))
    return [one] * (count if size * count < 100_000 else 2)


def _text() -> st.SearchStrategy[str]:
    short = st.text(max_size=20)
    return st.one_of(short, st.sampled_from(["", "a" * 32, "\0", "x" * 5000, "é" * 20_000]))
