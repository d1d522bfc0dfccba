"""What libcloud's errors mean, as far as they mean the same for every cloud."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Any

import requests
from libcloud.common.exceptions import BaseHTTPError, RateLimitReachedError
from libcloud.common.types import InvalidCredsError, MalformedResponseError

from infranetes.providers.cloud.interface import CloudError, Trouble

_MAX_WORDS = 400
_MAX_RETRY_AFTER = 300.0


def judge(error: Exception) -> CloudError:
    """The kind of trouble that `error` is."""
    if isinstance(error, CloudError):
        return error
    words = said(error)
    if isinstance(error, RateLimitReachedError):
        return CloudError(Trouble.THROTTLED, words, retry_after(error))
    if isinstance(error, InvalidCredsError):
        return CloudError(Trouble.CREDENTIALS, words)
    if isinstance(error, BaseHTTPError):
        return CloudError(_of_status(int(error.code)), words, retry_after(error))
    if isinstance(error, MalformedResponseError):
        return CloudError(Trouble.PASSING, "an answer that is none; something between may have made it")
    if isinstance(error, ssl.SSLError | requests.exceptions.SSLError):
        return CloudError(Trouble.PASSING, f"no TLS connection: {words}")
    if isinstance(error, requests.exceptions.Timeout | TimeoutError):
        return CloudError(Trouble.PASSING, "no answer in time")
    if isinstance(error, requests.exceptions.RequestException | OSError):
        return CloudError(Trouble.PASSING, f"the connection failed: {type(error).__name__}")
    return CloudError(Trouble.BROKEN, f"{type(error).__name__}: {words}")


def _of_status(status: int) -> Trouble:
    if status >= 500 or status == 408:
        return Trouble.PASSING
    if status == 429:
        return Trouble.THROTTLED
    if status in (401, 403):
        return Trouble.CREDENTIALS
    return Trouble.MISSING if status == 404 else Trouble.INVALID


def said(error: Exception) -> str:
    """The error's words: one line, bounded."""
    return " ".join(str(error).split())[:_MAX_WORDS] or type(error).__name__


def retry_after(error: Any) -> float:
    """Seconds that the answer asked to stay away for; libcloud has turned a date into seconds."""
    headers: Mapping[str, Any] = getattr(error, "headers", None) or {}
    try:
        return min(max(float(headers.get("retry-after", 0)), 0.0), _MAX_RETRY_AFTER)
    except ValueError:
        return 0.0
