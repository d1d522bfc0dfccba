# SPDX-License-Identifier: Apache-2.0
"""W3C Trace Context: what names a trace, and what is ignored."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.trace_context import TraceContext

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01"


def digits(count: int) -> st.SearchStrategy[str]:
    """So many hexadecimal digits, not all zero."""
    return st.text("0123456789abcdef", min_size=count, max_size=count).filter(lambda each: each.strip("0"))


CONTEXTS = st.builds(TraceContext, digits(32), digits(16), st.booleans())


class ParseTests(SynchronousTestCase):
    """From two headers."""

    def test_a_parent(self) -> None:
        self.assertEqual(TraceContext.parse(PARENT), TraceContext(TRACE, SPAN, sampled=True))
        self.assertEqual(TraceContext.parse(f"00-{TRACE}-{SPAN}-00"), TraceContext(TRACE, SPAN))

    def test_only_one_flag_counts(self) -> None:
        for flags, sampled in (("02", False), ("03", True), ("fe", False), ("ff", True)):
            found = TraceContext.parse(f"00-{TRACE}-{SPAN}-{flags}")
            self.assertEqual(found.sampled, sampled, flags)
            self.assertEqual(found.parent[-2:], f"{sampled:02d}")

    def test_a_later_version_is_read_as_far_as_it_is_known(self) -> None:
        known = TraceContext(TRACE, SPAN, sampled=True)
        for later in (f"01-{TRACE}-{SPAN}-01", f"cc-{TRACE}-{SPAN}-01-what-the-future-will-be-like"):
            self.assertEqual(TraceContext.parse(later), known)

    def test_what_is_malformed_names_no_trace(self) -> None:
        for malformed in (
            "",
            "00",
            PARENT[:-1],
            PARENT + "0",
            PARENT + "-more",
            PARENT.upper(),
            PARENT + "\n",
            f"ff-{TRACE}-{SPAN}-01",
            f"01-{TRACE}-{SPAN}-01.more",
            f"00-{'0' * 32}-{SPAN}-01",
            f"00-{TRACE}-{'0' * 16}-01",
            f"00-{TRACE[:-1]}g-{SPAN}-01",
            f"00_{TRACE}_{SPAN}_01",
            f"cc-{TRACE}-{SPAN}-01-" + "x" * 100_000,
        ):
            self.assertIsNone(TraceContext.parse(malformed), malformed[:80])

    def test_a_state_goes_along(self) -> None:
        for state, kept in (
            ("", ""),
            ("rojo=00f067aa0ba902b7,congo=t61rcWkgMzE", "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE"),
            ("a=1 , b=2,,", "a=1,b=2"),
            ("tenant@system=a:b", "tenant@system=a:b"),
        ):
            self.assertEqual(TraceContext.parse(PARENT, state).state, kept)

    def test_a_malformed_state_leaves_the_trace(self) -> None:
        many = ",".join(f"k{number}=v" for number in range(33))
        for state in ("nothing", "A=1", "a=1,a=2", "a=\x7f", "a=b=c", many, "a=" + "v" * 600, "a=é"):
            self.assertEqual(
                TraceContext.parse(PARENT, state), TraceContext(TRACE, SPAN, sampled=True), state
            )

    @given(st.text(), st.text())
    def test_nothing_fails(self, parent: str, state: str) -> None:
        TraceContext.parse(parent, state)
        TraceContext.of_metadata((("traceparent", parent), ("tracestate", state)))


class MetadataTests(SynchronousTestCase):
    """In a call's metadata."""

    def test_among_others(self) -> None:
        metadata = (
            ("user-agent", "grpc-go/1.72.2"),
            ("traceparent", PARENT),
            ("tracestate", "a=1"),
            ("x-bin", b"\0"),
            ("tracestate", "b=2"),
        )
        found = TraceContext.of_metadata(metadata)
        self.assertEqual(found, TraceContext(TRACE, SPAN, sampled=True, state="a=1,b=2"))
        self.assertEqual(found.to_metadata(), (("traceparent", PARENT), ("tracestate", "a=1,b=2")))

    def test_none_and_several_name_no_trace(self) -> None:
        for metadata in ((), (("tracestate", "a=1"),), (("traceparent", PARENT),) * 2):
            self.assertIsNone(TraceContext.of_metadata(metadata))

    @given(CONTEXTS)
    def test_what_is_told_is_understood(self, context: TraceContext) -> None:
        self.assertEqual(TraceContext.of_metadata(context.to_metadata()), context)
