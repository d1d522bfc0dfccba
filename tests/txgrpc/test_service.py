# SPDX-License-Identifier: Apache-2.0
"""A service put together from several implementations."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.trial import unittest

from tests.txgrpc.demo import DEMO, Note
from tests.txgrpc.memory_case import MemoryCase, start
from tests.txgrpc.support import drain_iterator
from txgrpc import Code, Disconnected, GrpcError, Limits, Server, Service
from txgrpc.service import Answer, Method


class Echoes:
    """Offers Echo, and has an attribute that is no RPC."""

    helper = "not an RPC"

    async def Echo(self, request: Any, call: Any) -> Any:
        return Note(text=f"{request.text}!")


class Counts:
    """Offers Count."""

    async def Count(self, request: Any, call: Any) -> Any:
        for number in range(request.number):
            yield Note(number=number)


class ServiceTests(unittest.SynchronousTestCase):
    """Who answers what."""

    def test_each_method_is_answered_by_the_implementation_that_offers_it(self) -> None:
        echoes, counts = Echoes(), Counts()
        service = Service(DEMO, echoes, counts)
        self.assertEqual(
            {method.path: answer for method, answer in service.answers.items()},
            {"/txgrpc.demo.Demo/Echo": echoes.Echo, "/txgrpc.demo.Demo/Count": counts.Count},
        )
        self.assertEqual(service.name, "txgrpc.demo.Demo")

    def test_a_method_offered_twice_is_an_error(self) -> None:
        class More(Echoes):
            pass

        error = self.assertRaises(ValueError, Service, DEMO, Counts(), Echoes(), More())
        self.assertEqual(
            str(error), "/txgrpc.demo.Demo/Echo is offered by Echoes and More: leave it to one of them"
        )

    def test_None_offers_nothing(self) -> None:
        """An implementation takes back a method of its class by None in its place."""

        class Silent(Echoes):
            Echo: Any = None

        self.assertEqual(Service(DEMO, Silent()).answers, {})
        self.assertEqual(len(Service(DEMO, Silent(), Echoes()).answers), 1)

    def test_an_interceptor_stands_before_each_answer(self) -> None:
        seen = []

        def interceptor(method: Method, answer: Answer) -> Answer:
            async def intercepted(request: Any, call: Any) -> Any:
                seen.append(method.name)
                return await answer(request, call)

            return answer if method.server_streaming else intercepted

        counts = Counts()
        service = Service(DEMO, Echoes(), counts).intercept(interceptor)
        answers: Any = {method.name: answer for method, answer in service.answers.items()}
        answer = self.successResultOf(Deferred.fromCoroutine(answers["Echo"](Note(text="hi"), None)))
        self.assertEqual((answer.text, seen), ("hi!", ["Echo"]))
        self.assertEqual(answers["Count"], counts.Count)


class CallTests(MemoryCase):
    """Calls to a service of two implementations."""

    def test_calls(self) -> None:
        world = self.world(services=[Service(DEMO, Echoes(), Counts())])
        self.assertEqual(
            self.successResultOf(self.settled(world, world.stub.Echo(Note(text="hi")))).text, "hi!"
        )
        failed = self.failureResultOf(self.settled(world, world.stub.Wait(Note())))
        self.assertEqual(failed.value.code, Code.UNIMPLEMENTED)
        self.assertEqual(failed.value.message, "the service txgrpc.demo.Demo does not offer Wait here")

    def test_errors_that_were_foreseen_are_not_logged_and_others_are(self) -> None:
        """A translation says which status an exception has; one that fails itself is an unexpected error."""
        foreseen = GrpcError(Code.NOT_FOUND, "no such note")

        def translate(error: BaseException) -> GrpcError:
            if isinstance(error, RuntimeError):
                return foreseen
            raise ZeroDivisionError("in the translation")

        world = self.world(server={"translate_error": translate})
        self.assertIs(self.code_of(self.settled(world, world.stub.Fail(Note(number=-1)))), Code.NOT_FOUND)
        self.assertEqual(self.flushLoggedErrors(), [])
        call = world.stub.Fail(Note(number=int(Code.ABORTED)))
        self.assertIs(self.code_of(self.settled(world, call)), Code.ABORTED)
        self.assertTrue(self.flushLoggedErrors(ZeroDivisionError))

    def test_a_method_that_is_cancelled_by_itself_has_failed(self) -> None:
        """Its caller has not cancelled anything, and is told."""

        class Cancelled:
            async def Echo(self, request: Any, call: Any) -> Any:
                raise CancelledError

        world = self.world(services=[Service(DEMO, Cancelled())])
        self.assertIs(self.code_of(self.settled(world, world.stub.Echo(Note()))), Code.INTERNAL)
        self.assertTrue(self.flushLoggedErrors(CancelledError))

    def test_headers_over_the_limit_end_the_call_and_far_over_it_the_connection(self) -> None:
        world = self.world(server={"limits": Limits(max_header_list=1024)})
        for size, kind in ((2000, GrpcError), (20_000, Disconnected)):
            call = self.settled(world, world.stub.Echo(Note(), metadata=[("x-long", "x" * size)]))
            self.assertIs(type(self.failureResultOf(call).value), kind)

    def test_responses_may_come_from_any_iterator(self) -> None:
        """Not only from a generator, which is closed when the call ends."""

        class Down:
            def __init__(self, number: int) -> None:
                self.number = number

            def __aiter__(self) -> Down:
                return self

            async def __anext__(self) -> Any:
                if not self.number:
                    raise StopAsyncIteration
                self.number -= 1
                return Note(number=self.number)

        class Counting:
            def Count(self, request: Any, call: Any) -> Any:
                return Down(request.number)

        world = self.world(services=[Service(DEMO, Counting())])
        heard = self.settled(world, start(drain_iterator(world.stub.Count(Note(number=3)))))
        self.assertEqual([each.number for each in self.successResultOf(heard)], [2, 1, 0])

    def test_a_service_given_twice_is_an_error(self) -> None:
        world = self.world()
        one, two = Service(DEMO, Echoes()), Service(DEMO, Counts())
        self.assertRaises(ValueError, Server, world.clock, [one, two])
