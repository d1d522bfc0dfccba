# SPDX-License-Identifier: Apache-2.0
"""Fields that are read without parsing a message are those that protobuf reads."""

from __future__ import annotations

from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from infranetes.delegate.wire import bytes_field, fields, items, message_field, string_field
from infranetes_common.errors import InvalidArgument
from infranetes_common.wire import cri


def varint(number: int) -> bytes:
    """Return a number in protobuf's encoding."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes(out) + bytes([number])


def tagged(number: int, kind: int, content: bytes) -> bytes:
    """Return an encoded field."""
    return varint(number << 3 | kind) + content


def text(number: int, content: bytes) -> bytes:
    """Return an encoded field of text, bytes or a message."""
    return tagged(number, 2, varint(len(content)) + content)


NUMBERS = st.sampled_from((1, 2, 3, 15, 16, 1000, (1 << 29) - 1))
PLAIN = st.one_of(
    st.builds(lambda n, value: tagged(n, 0, varint(value)), NUMBERS, st.integers(0, 2**64 - 1)),
    st.builds(lambda n, content: tagged(n, 1, content), NUMBERS, st.binary(min_size=8, max_size=8)),
    st.builds(lambda n, content: tagged(n, 5, content), NUMBERS, st.binary(min_size=4, max_size=4)),
    st.builds(lambda n, content: text(n, content.encode()), NUMBERS, st.text(max_size=8)),
)
MESSAGES = st.lists(
    st.recursive(
        PLAIN,
        lambda inner: st.builds(
            lambda n, parts: tagged(n, 3, b"".join(parts)) + tagged(n, 4, b""), NUMBERS, st.lists(inner)
        ),
        max_leaves=8,
    ),
    max_size=8,
).map(b"".join)


def parsed(message: bytes) -> Any:
    """Return the message as protobuf parses it, or None if it does not."""
    try:
        return cri.PodSandboxStatusRequest.FromString(message)
    except Exception:  # DecodeError; its class differs between protobuf's implementations
        return None


class WireTests(SynchronousTestCase):
    @given(MESSAGES)
    def test_the_text_of_a_message_with_unknown_fields_and_groups(self, message: bytes) -> None:
        known = parsed(message)
        self.assertIsNotNone(known)
        self.assertEqual(string_field(message), known.pod_sandbox_id)

    @given(
        st.one_of(st.binary(max_size=40), MESSAGES.flatmap(lambda m: st.sampled_from([m[:-1], m + b"\x0a"])))
    )
    @example(b"\x0a\x02\xff\xff")
    @example(b"\x0b\x0c\x0a\x01x")
    def test_what_protobuf_reads_is_read_alike_or_refused(self, message: bytes) -> None:
        known = parsed(message)
        try:
            found = string_field(message)
        except InvalidArgument:
            return
        if known is not None:
            self.assertEqual(found, known.pod_sandbox_id)

    def test_what_is_no_message_is_refused(self) -> None:
        for message in (
            b"\x0a",  # no length
            b"\x0a\x05abc",  # too short
            b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",  # a length of too many bytes
            b"\x0b",  # a group without an end
            b"\x0c",  # an end without a group
            b"\x0b\x14",  # the end of another group
            b"\x02\x00",  # field 0
            b"\x0f",  # wire type 7
            b"\x8a\x80\x80\x80\x80\x80\x00\x01x",  # a tag of too many bytes
            b"\x0b" * 200 + b"\x0c" * 200,  # too deep
            b"\x0a\x01\xff",  # not UTF-8
            b"\x09\x01",  # only one of eight bytes
        ):
            with self.assertRaises(InvalidArgument, msg=str(message)):
                string_field(message)

    def test_of_several_the_last_counts_and_messages_are_joined(self) -> None:
        self.assertEqual(string_field(text(1, b"a") + tagged(1, 0, b"\x01") + text(1, b"b")), "b")
        image = cri.ImageSpec(image="one").SerializeToString()
        more = cri.ImageSpec(user_specified_image="two").SerializeToString()
        both = text(1, image) + text(1, more)
        known = cri.PullImageRequest.FromString(both).image
        self.assertEqual(cri.ImageSpec.FromString(message_field(both, 1)), known)
        self.assertEqual((string_field(b""), bytes_field(b"", 3), message_field(b"", 1)), ("", b"", b""))

    def test_items_joined_are_the_list(self) -> None:
        listed = cri.ListContainersResponse(containers=[cri.Container(id="a"), cri.Container(id="b")])
        message = listed.SerializeToString() + text(1000, b"newer")
        found = list(items(message, 1))
        self.assertEqual(b"".join(whole for whole, _ in found), message)
        self.assertEqual([cri.Container.FromString(item).id for _, item in found], ["a", "b", ""])
        self.assertEqual([field.number for field in fields(message)], [1, 1, 1000])
