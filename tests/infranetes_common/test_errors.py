# SPDX-License-Identifier: Apache-2.0
"""The one hierarchy of errors and its gRPC statuses."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from infranetes_common import errors
from infranetes_common.errors import InfranetesError
from txgrpc import Code, GrpcError

# Finer kinds, which only this process tells apart.
CROSS_AS_ANOTHER: dict[type[InfranetesError], type[InfranetesError]] = {
    errors.ConfigError: errors.InvalidArgument,
    errors.NotOffered: errors.FailedPrecondition,
}


def kinds(base: type[InfranetesError] = InfranetesError) -> list[type[InfranetesError]]:
    """Every class of the hierarchy in its own module."""
    found = [kind for kind in base.__subclasses__() if kind.__module__ == errors.__name__]
    return [base, *(each for kind in found for each in kinds(kind))]


class MappingTests(SynchronousTestCase):
    def test_an_error_crosses_the_wire_as_what_it_was(self) -> None:
        for kind in kinds():
            arrived = errors.from_grpc(errors.to_grpc(kind("vm 5 is gone; make another")))
            self.assertIs(type(arrived), CROSS_AS_ANOTHER.get(kind, kind))
            self.assertEqual(str(arrived), "vm 5 is gone; make another")

    def test_no_two_others_share_a_status(self) -> None:
        codes = [kind.code for kind in kinds() if kind not in CROSS_AS_ANOTHER]
        self.assertEqual(len(codes), len(set(codes)))
        self.assertNotIn(Code.OK, codes)

    def test_every_status_comes_back_as_some_error_with_its_words(self) -> None:
        for code in set(Code) - {Code.OK}:
            arrived = errors.from_grpc(GrpcError(code, "words"))
            self.assertIsInstance(arrived, InfranetesError)
            self.assertEqual(str(arrived), "words")

    def test_a_status_passes_as_it_is(self) -> None:
        error = GrpcError(Code.ABORTED, "words", (("key", "value"),))
        self.assertIs(errors.to_grpc(error), error)

    def test_secrets_stay_here(self) -> None:
        words = "https://me:hunter22@proxy.example refused"
        for error in (errors.Unavailable(words), GrpcError(Code.UNAVAILABLE, words, (("key", "value"),))):
            status = errors.to_grpc(error)
            self.assertEqual(status.code, Code.UNAVAILABLE)
            self.assertEqual(status.message, "https://(hidden)@proxy.example refused")
        self.assertEqual(status.metadata, (("key", "value"),))

    def test_a_code_alone_is_that_of_the_status(self) -> None:
        for error in (*(kind("no") for kind in kinds()), GrpcError(Code.ABORTED, ""), RuntimeError()):
            self.assertIs(errors.code_of(error), errors.to_grpc(error).code)

    def test_what_nobody_expected_tells_its_kind_alone(self) -> None:
        status = errors.to_grpc(RuntimeError("with a password"))
        self.assertEqual(status.code, Code.INTERNAL)
        self.assertIn("RuntimeError", status.message)
        self.assertNotIn("password", status.message)
