# SPDX-License-Identifier: Apache-2.0
"""The messages of volume drivers are on the wire what everybody else's are.

They are compared with the descriptors in the Go modules of the specifications, at pinned releases.
"""

from __future__ import annotations

import re
from pathlib import Path

from google.protobuf import descriptor_pb2, descriptor_pool, timestamp_pb2, wrappers_pb2
from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.wire import descriptors
from tests.harness.needs import needs_tools
from tests.infranetes_common.wire.test_cri_wire import Facts, differences, file_facts

TOOLS = Path(__file__).resolve().parents[2] / "build" / "tools"
NEEDED = (descriptor_pb2, timestamp_pb2, wrappers_pb2)
WRAPPERS = {  # protobuf's own, of which our file has equal ones
    "BoolValue": wrappers_pb2,
    "Int64Value": wrappers_pb2,
    "Timestamp": timestamp_pb2,
}

_ESCAPE = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|(.))")
_SHORT = {"n": b"\n", "t": b"\t", "r": b"\r", "a": b"\a", "b": b"\b", "f": b"\f", "v": b"\v"}


def text_of_go(literal: str) -> bytes:
    """The bytes of a string literal of Go, which is given without its quotes."""
    found, at = b"", 0
    for each in _ESCAPE.finditer(literal):
        found += literal[at : each.start()].encode()
        if each[1]:
            found += bytes([int(each[1], 16)])
        elif each[2]:
            found += chr(int(each[2], 16)).encode()
        else:
            found += _SHORT.get(each[3], each[3].encode())
        at = each.end()
    return found + literal[at:].encode()


def raw_descriptor(generated: str) -> bytes:
    """The descriptor in a module that protoc-gen-go has written."""
    whole = re.search(r'_rawDesc = ""((?: \+\n\t"(?:[^"\\\n]|\\.)*")+)', generated)
    if whole is not None:
        return b"".join(text_of_go(each) for each in re.findall(r'"((?:[^"\\\n]|\\.)*)"', whole[1]))
    numbers = re.search(r"_rawDesc = string\(\[\]byte\{([^}]*)\}", generated)
    assert numbers is not None
    return bytes(int(each, 16) for each in re.findall(r"0x[0-9a-f]{2}", numbers[1]))


def theirs(name: str) -> Facts:
    """What a specification says."""
    pool = descriptor_pool.DescriptorPool()
    for each in NEEDED:
        pool.AddSerializedFile(each.DESCRIPTOR.serialized_pb)
    raw = raw_descriptor((TOOLS / name).read_text())
    pool.AddSerializedFile(raw)
    return file_facts(pool.FindFileByName(descriptor_pb2.FileDescriptorProto.FromString(raw).name))


def as_ours(theirs: Facts, ours: Facts) -> Facts:
    """Of what they have, that which we have: messages and enums as a whole, the methods of services one by
    one."""
    for message in theirs["messages"].values():
        for field in message["fields"]:
            field["type"] = field["type"].removeprefix("google.protobuf.")
    kept: Facts = {"package": theirs["package"], "services": {}}
    for kind in ("messages", "enums"):
        kept[kind] = {name: theirs[kind][name] for name in ours[kind] if name in theirs[kind]}
    for name, methods in ours["services"].items():
        both = methods.keys() & theirs["services"][name].keys()
        kept["services"][name] = {method: theirs["services"][name][method] for method in both}
    return kept


@needs_tools("csi-sanity")
class WireTests(SynchronousTestCase):
    def test_every_message_enum_and_method_is_csis(self) -> None:
        ours = file_facts(descriptors.file("csi.proto"))
        for name, module in WRAPPERS.items():
            wrapped = file_facts(module.DESCRIPTOR)["messages"][name]
            self.assertEqual(ours["messages"].pop(name), wrapped)
        self.assertEqual(differences(ours, as_ours(theirs("csi.pb.go"), ours)), [])

    def test_every_message_and_method_of_registration_is_kubelets(self) -> None:
        ours = file_facts(descriptors.file("pluginregistration.proto"))
        self.assertEqual(differences(ours, theirs("pluginregistration.pb.go")), [])

    def test_a_difference_is_seen(self) -> None:
        ours, found = file_facts(descriptors.file("csi.proto")), theirs("csi.pb.go")
        found["messages"]["Volume"]["fields"][1]["number"] = 9
        del found["services"]["Node"]["NodeExpandVolume"]
        del found["messages"]["Topology"]
        for name in WRAPPERS:
            del ours["messages"][name]
        self.assertEqual(len(differences(ours, as_ours(found, ours))), 3)

    def test_strings_of_go_are_read(self) -> None:
        self.assertEqual(text_of_go(r"a\x00\n\"\\\u00e9b"), b'a\0\n"\\\xc3\xa9b')
