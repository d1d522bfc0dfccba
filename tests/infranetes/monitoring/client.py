# SPDX-License-Identifier: Apache-2.0
"""Responses over HTTP, as a simple client gets them."""

from __future__ import annotations

import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from email.message import Message

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.threads import deferToThread


@attrs.frozen
class Answer:
    """One answer."""

    status: int
    headers: Mapping[str, str]
    body: str


def get(
    url: str,
    headers: Mapping[str, str] | None = None,
    *,
    method: str = "GET",
    data: bytes | None = None,
    trust: ssl.SSLContext | None = None,
) -> Deferred[Answer]:
    """Ask for `url`."""
    request = urllib.request.Request(url, headers=dict(headers or {}), method=method, data=data)  # noqa: S310

    def ask() -> Answer:
        try:
            with urllib.request.urlopen(request, timeout=60, context=trust) as response:  # noqa: S310
                return Answer(response.status, _joined(response.headers), response.read().decode())
        except urllib.error.HTTPError as error:
            with error:
                return Answer(error.code, _joined(error.headers), error.read().decode())

    return deferToThread(ask)


def _joined(headers: Message) -> Mapping[str, str]:
    return {name: ", ".join(headers.get_all(name, [])) for name in headers}
