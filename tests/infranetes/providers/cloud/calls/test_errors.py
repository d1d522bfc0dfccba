# SPDX-License-Identifier: Apache-2.0
"""What a cloud's errors mean."""

from __future__ import annotations

import requests
from libcloud.common.exceptions import exception_from_message
from libcloud.common.types import InvalidCredsError, MalformedResponseError
from twisted.trial.unittest import SynchronousTestCase

from infranetes.providers.cloud.aws import errors
from infranetes.providers.cloud.calls.errors import classify
from infranetes.providers.cloud.interface import ErrorKind


class ErrorTests(SynchronousTestCase):
    def test_codes_of_ec2(self) -> None:
        for words, status, trouble in (
            ("RequestLimitExceeded: slow", 503, ErrorKind.THROTTLED),
            ("InternalError: oops", 500, ErrorKind.TRANSIENT),
            ("InsufficientInstanceCapacity: none", 500, ErrorKind.CAPACITY),
            ("Server.InsufficientInstanceCapacity: none", 500, ErrorKind.CAPACITY),
            ("VcpuLimitExceeded: none", 400, ErrorKind.FAMILY_QUOTA),
            ("MaxSpotInstanceCountExceeded: none", 400, ErrorKind.FAMILY_QUOTA),
            ("InstanceLimitExceeded: none", 400, ErrorKind.QUOTA),
            ("UnauthorizedOperation: no", 403, ErrorKind.CREDENTIALS),
            ("InvalidInstanceID.NotFound: which", 400, ErrorKind.NOT_FOUND),
            ("InvalidParameterValue: odd", 400, ErrorKind.INVALID),
        ):
            error = exception_from_message(status, words, {})
            self.assertIs((errors.classify(error) or classify(error)).kind, trouble, words)

    def test_errors_of_all_clouds(self) -> None:
        for error, trouble in (
            (exception_from_message(429, "slow", {"retry-after": "3"}), ErrorKind.THROTTLED),
            (exception_from_message(502, "gateway", {}), ErrorKind.TRANSIENT),
            (exception_from_message(403, "no", {}), ErrorKind.CREDENTIALS),
            (exception_from_message(404, "no", {}), ErrorKind.NOT_FOUND),
            (InvalidCredsError("no"), ErrorKind.CREDENTIALS),
            (MalformedResponseError("html", body="<html>"), ErrorKind.TRANSIENT),
            (requests.exceptions.ReadTimeout(), ErrorKind.TRANSIENT),
            (requests.exceptions.ConnectionError(), ErrorKind.TRANSIENT),
            (ConnectionResetError(), ErrorKind.TRANSIENT),
            (ValueError("a bug"), ErrorKind.UNEXPECTED),
        ):
            self.assertIs(classify(error).kind, trouble, repr(error))

    def test_retry_after_in_seconds_or_as_a_date(self) -> None:
        found = classify(exception_from_message(503, "", {"retry-after": "12"}))
        self.assertEqual(found.retry_after, 12.0)
        date = "Fri, 31 Dec 2199 23:59:59 GMT"
        self.assertEqual(classify(exception_from_message(503, "", {"retry-after": date})).retry_after, 300.0)
