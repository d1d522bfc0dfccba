# SPDX-License-Identifier: Apache-2.0
"""A channel that does not take everything from its server."""

from __future__ import annotations

from typing import Any

from tests.txgrpc.demo import Note
from tests.txgrpc.memory_case import MemoryCase, start
from tests.txgrpc.support import drain_iterator
from txgrpc import Code, GrpcError
from txgrpc.service import Method


class Strict:
    """Takes 100 bytes, a million from Echo, and nothing with an `x` in it."""

    def __init__(self) -> None:
        self.checked = 0

    def max_response(self, method: Method) -> int:
        return 1_000_000 if method.name == "Echo" else 100

    def check(self, method: Method, payload: bytes) -> None:
        self.checked += 1
        if b"x" in payload:
            raise GrpcError(Code.INTERNAL, f"{method.name} says x")


class ScreenTests(MemoryCase):
    """What such a one takes."""

    def setUp(self) -> None:
        self.screen = Strict()
        self.strict = self.world(channel={"screen": self.screen})

    def refused(self, call: Any) -> GrpcError:
        self.strict.settle()
        failure: Any = self.failureResultOf(call, GrpcError)
        return failure.value  # type: ignore[no-any-return]

    def test_each_method_has_its_own_limit(self) -> None:
        large = self.strict.stub.Echo(Note(text="y" * 500_000))
        self.strict.settle()
        self.assertEqual(len(self.successResultOf(large).text), 500_000)
        error = self.refused(start(drain_iterator(self.strict.stub.Count(Note(number=3, blob=b"y" * 200)))))
        self.assertIs(error.code, Code.RESOURCE_EXHAUSTED)
        self.assertIn("limit of 100 bytes", error.message)
        self.assertEqual(self.screen.checked, 1)

    def test_what_is_refused_ends_its_call_and_no_other(self) -> None:
        stream = start(drain_iterator(self.strict.stub.Count(Note(number=3, blob=b"x"))))
        good = self.strict.stub.Echo(Note(text="y"))
        bad = self.strict.stub.Echo(Note(text="x"))
        self.assertIn("Count says x", self.refused(stream).message)
        self.assertIn("Echo says x", self.refused(bad).message)
        self.assertEqual(self.successResultOf(good).text, "y")
        self.assertEqual(len(self.strict.wires), 1)
