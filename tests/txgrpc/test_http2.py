# SPDX-License-Identifier: Apache-2.0
"""What `txgrpc.http2` adds to h2."""

from __future__ import annotations

from h2.events import RequestReceived, ResponseReceived, TrailersReceived
from h2.exceptions import ProtocolError
from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import TestCase

from txgrpc.http2 import HeaderValidator
from txgrpc.metadata import Headers

REQUEST: Headers = [
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/a.B/C"),
    (b":authority", b"localhost"),
    (b"te", b"trailers"),
    (b"content-type", b"application/grpc"),
]
VALUES = (b"1", b"x", b"1S", b"00000001n", b"123456789S", b" 1S", b"1S ", b"1\0S", b"1\nS", b"\xff", b"")
PAIRS = st.tuples(
    st.sampled_from((b"grpc-timeout", b"te", b":path", b"Upper", b"connection", b"x", b"a:b", b"")),
    st.one_of(st.sampled_from(VALUES), st.binary(max_size=3)),
)


def valid(validator: HeaderValidator, headers: Headers) -> bool:
    try:
        validator.check(headers, RequestReceived)
    except ProtocolError:
        return False
    return True


class HeaderValidatorTests(TestCase):
    """It decides as h2 does, whatever it was asked before."""

    def test_what_is_malformed_is_refused_each_time(self) -> None:
        validator = HeaderValidator(client_side=False)
        validator.check(REQUEST, RequestReceived)
        for wrong in (
            [*REQUEST, (b"Upper", b"x")],
            [*REQUEST, (b"connection", b"close")],
            [*REQUEST, (b":path", b"/again")],
            REQUEST[1:],
        ):
            for _ in range(2):
                self.assertRaises(ProtocolError, validator.check, wrong, RequestReceived)

    def test_what_is_valid_in_a_request_need_not_be_in_trailers(self) -> None:
        validator = HeaderValidator(client_side=True)
        response: Headers = [(b":status", b"200"), (b"content-type", b"application/grpc")]
        validator.check(response, ResponseReceived)
        self.assertRaises(ProtocolError, validator.check, response, TrailersReceived)

    @given(st.lists(st.lists(PAIRS, max_size=3), max_size=8))
    def test_it_decides_the_same_for_a_peer_that_it_remembers_and_for_a_new_one(
        self, requests: list[Headers]
    ) -> None:
        remembering = HeaderValidator(client_side=False)
        for more in requests:
            headers = [*REQUEST, *more]
            new = HeaderValidator(client_side=False)
            self.assertEqual(valid(remembering, headers), valid(new, headers))

    def test_how_much_it_remembers_of_a_peer_is_bounded(self) -> None:
        validator = HeaderValidator(client_side=False)
        for number in range(1000):
            validator.check([*REQUEST, (b"n", b"%d" % number)], RequestReceived)
            validator.check([*REQUEST, (b"n", b"%d" % number + b"x" * 2000)], RequestReceived)
        remembered = [key for key in validator._valid if isinstance(key, tuple)]
        self.assertLessEqual(len(remembered), 64)
        self.assertLess(max(len(repr(key)) for key in remembered), 2000)
