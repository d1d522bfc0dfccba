# SPDX-License-Identifier: Apache-2.0
"""The meanings of libcloud's errors that are the same for every cloud."""

from __future__ import annotations

import ssl
from collections.abc import Mapping

import requests
from libcloud.common.exceptions import BaseHTTPError, RateLimitReachedError
from libcloud.common.types import InvalidCredsError, MalformedResponseError

from infranetes.providers.cloud.interface import CloudError, ErrorKind

_MAX_MESSAGE = 400
_MAX_RETRY_AFTER = 300.0


def classify(error: Exception) -> CloudError:
    """Return `error` as a `CloudError` of its kind."""
    if isinstance(error, CloudError):
        return error
    message = message_of(error)
    if isinstance(error, RateLimitReachedError):
        return CloudError(ErrorKind.THROTTLED, message, retry_after(error))
    if isinstance(error, InvalidCredsError):
        return CloudError(ErrorKind.CREDENTIALS, message)
    if isinstance(error, BaseHTTPError):
        return CloudError(kind_of_status(int(error.code)), message, retry_after(error))
    if isinstance(error, MalformedResponseError):
        return CloudError(
            ErrorKind.TRANSIENT, "a malformed answer, perhaps of a proxy between us and the cloud"
        )
    if isinstance(error, ssl.SSLError | requests.exceptions.SSLError):
        return CloudError(ErrorKind.TRANSIENT, f"no TLS connection: {message}")
    if isinstance(error, requests.exceptions.Timeout | TimeoutError):
        return CloudError(ErrorKind.TRANSIENT, "no answer in time")
    if isinstance(error, requests.exceptions.RequestException | OSError):
        return CloudError(ErrorKind.TRANSIENT, f"the connection failed: {type(error).__name__}")
    return CloudError(ErrorKind.UNEXPECTED, f"{type(error).__name__}: {message}")


def kind_of_status(status: int) -> ErrorKind:
    """Return the kind of an HTTP status of which nothing more is known."""
    if status >= 500 or status == 408:
        return ErrorKind.TRANSIENT
    if status == 429:
        return ErrorKind.THROTTLED
    if status in (401, 403):
        return ErrorKind.CREDENTIALS
    return ErrorKind.NOT_FOUND if status == 404 else ErrorKind.INVALID


def message_of(error: Exception) -> str:
    """Return the error's message as one line of bounded length."""
    return " ".join(str(error).split())[:_MAX_MESSAGE] or type(error).__name__


def retry_after(error: Exception) -> float:
    """Seconds for which the answer asked us not to call; libcloud has turned a date into seconds."""
    headers: Mapping[str, str | float] = getattr(error, "headers", None) or {}
    try:
        return min(max(float(headers.get("retry-after", 0)), 0.0), _MAX_RETRY_AFTER)
    except ValueError:
        return 0.0
