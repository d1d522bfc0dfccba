# SPDX-License-Identifier: Apache-2.0
"""Who follows a channel's calls: what is sent along, and the end, which is heard once."""

from __future__ import annotations

from typing import TypeVar

import attrs
from twisted.internet.defer import Deferred

from tests.txgrpc.demo import Note
from tests.txgrpc.memory_case import MemoryCase, start
from tests.txgrpc.support import drain_iterator
from txgrpc import Code, GrpcError
from txgrpc.metadata import Metadata
from txgrpc.service import Method

T = TypeVar("T")


@attrs.define(eq=False)
class Followed:
    """A call that is followed."""

    metadata: Metadata
    ends: list[tuple[Code, Metadata]] = attrs.field(factory=list)

    def ended(self, error: GrpcError | None, trailing: Metadata) -> None:
        self.ends.append((Code.OK if error is None else error.code, trailing))


class ObserverTests(MemoryCase):
    """What one hears."""

    def setUp(self) -> None:
        self.followed: list[tuple[str, Followed]] = []
        self.observed = self.world(channel={"observer": self.observe})

    def observe(self, method: Method) -> Followed | None:
        if method.name == "Sum":
            return None
        followed = Followed((("x-trace", str(len(self.followed))),))
        self.followed.append((method.name, followed))
        return followed

    def settled(self, call: Deferred[T]) -> T:
        self.observed.settle()
        return self.successResultOf(call)

    def test_what_is_sent_along_and_the_end(self) -> None:
        call = self.observed.stub.Echo(Note(text="y"), metadata=(("x-own", "1"),))
        self.assertEqual(self.settled(call).text, "y")
        [(name, followed)] = self.followed
        sent = (("x-own", "1"), ("x-trace", "0"))
        self.assertEqual((name, followed.ends), ("Echo", [(Code.OK, sent)]))

    def test_a_failure_a_stream_and_a_call_that_is_cancelled(self) -> None:
        failing = self.observed.stub.Fail(Note(number=int(Code.NOT_FOUND)))
        self.settled(start(drain_iterator(self.observed.stub.Count(Note(number=3)))))
        self.failureResultOf(failing, GrpcError)
        waiting = self.observed.stub.Wait(Note())
        waiting.cancel()
        self.failureResultOf(waiting, GrpcError)
        self.observed.settle()
        ends = [(name, [code for code, _ in followed.ends]) for name, followed in self.followed]
        expected = [("Fail", [Code.NOT_FOUND]), ("Count", [Code.OK]), ("Wait", [Code.CANCELLED])]
        self.assertEqual(ends, expected)

    def test_a_call_that_is_not_followed(self) -> None:
        self.assertEqual(self.settled(self.observed.stub.Sum([Note(number=1), Note(number=2)])).number, 3)
        self.assertEqual(self.followed, [])

    def test_a_call_that_could_not_begin_is_not_heard_of(self) -> None:
        self.assertRaises(ValueError, self.observed.stub.Echo, Note(), metadata=(("grpc-own", "1"),))
        self.assertEqual(self.followed, [])
