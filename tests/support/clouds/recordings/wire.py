# SPDX-License-Identifier: Apache-2.0
"""The messages between libcloud and a cloud, as JSON structures."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias
from unittest.mock import patch
from urllib.parse import parse_qsl, urlsplit
from xml.etree import ElementTree

import attrs
from libcloud.http import LibcloudConnection

from tests.support.clouds import discovery

Value: TypeAlias = "Mapping[str, Value] | Sequence[Value] | str | int | float | bool | None"
"""What JSON has."""

AWS, GCP = "aws", "gcp"
XML, JSON = "text/xml", "application/json"
UNREADABLE = "unreadable"  # stands for an answer that is neither
_COMPUTE = "/compute/v1/"
_COMMON = ("Action", "Version")  # in every form


@attrs.frozen
class Exchange:
    """A request and its answer."""

    method: str
    url: str
    sent: str
    status: int
    content_type: str
    received: bytes = attrs.field(repr=False)


@attrs.frozen
class Call:
    """A parsed request and its answer.

    :ivar kind: the API's name of the request; "": not known. :ivar answer: an XML element without children is
        its text, and one whose children are items is a list of these."""

    kind: str
    asked: Value
    status: int
    content_type: str
    answer: Value


@contextmanager
def tapped(hear: Callable[[Exchange], None]) -> Iterator[None]:
    """Also pass to `hear` what libcloud's connections send and receive in this block, in their threads."""
    send = LibcloudConnection.request

    def request(
        connection: Any, method: str, url: str, *rest: Any, **options: Any
    ) -> None:  # Any: libcloud's
        send(connection, method, url, *rest, **options)
        answer = connection.response
        sent = options.get("body", rest[0] if rest else None) or ""
        hear(
            Exchange(
                method.upper(),
                str(answer.request.url),
                sent.decode() if isinstance(sent, bytes) else str(sent),
                int(answer.status_code),
                str(answer.headers.get("Content-Type", "")),
                bytes(answer.content),
            )
        )

    with patch.object(LibcloudConnection, "request", request):
        yield


def understood(cloud: str, exchange: Exchange) -> Call | None:
    """Parse a call to EC2 or Compute Engine; None: it is to another service (such as for tokens and prices),
    whose calls are not recorded."""
    found = _of_ec2(exchange) if cloud == AWS else _of_compute(exchange)
    if found is None:
        return None
    kind, asked = found
    content_type = exchange.content_type.partition(";")[0].strip().lower()
    answer = parsed(exchange.received, XML if cloud == AWS else JSON)
    return Call(kind, asked, exchange.status, content_type if content_type in (XML, JSON) else "", answer)


def _of_ec2(exchange: Exchange) -> tuple[str, Value] | None:
    form = dict(parse_qsl(exchange.sent, keep_blank_values=True))
    if "Action" not in form:
        return None
    return form["Action"], {name: value for name, value in form.items() if name not in _COMMON}


def _of_compute(exchange: Exchange) -> tuple[str, Value] | None:
    parts = urlsplit(exchange.url)
    if not parts.path.startswith(_COMPUTE):
        return None
    kind = discovery.compute().named(exchange.method, parts.path.removeprefix(_COMPUTE))
    body = parsed(exchange.sent.encode(), JSON) if exchange.sent else None
    return kind, {"query": dict(parse_qsl(parts.query, keep_blank_values=True)), "body": body}


def parsed(content: bytes, content_type: str) -> Value:
    """Return an answer's structure."""
    try:
        if content_type == JSON:
            found: Value = json.loads(content)
            return found
        return _of_root(ElementTree.fromstring(content))  # noqa: S314  libcloud has parsed it too
    except (ValueError, ElementTree.ParseError):
        return UNREADABLE


def _of_root(root: ElementTree.Element) -> Value:
    namespace, name = _split(root.tag)
    inside = _of_element(root)
    return {name: {"xmlns": namespace, **inside} if isinstance(inside, Mapping) else inside}


def _of_element(element: ElementTree.Element) -> Value:
    children = [(_split(child.tag)[1], _of_element(child)) for child in element]
    names = {name for name, _ in children}
    if not children:
        return (element.text or "").strip()
    if names == {"item"}:
        return [value for _, value in children]
    found: dict[str, Value] = {}
    for name in dict.fromkeys(name for name, _ in children):
        values = [value for each, value in children if each == name]
        found[name] = values[0] if len(values) == 1 else values
    return found


def _split(tag: str) -> tuple[str, str]:
    """Split a tag as ElementTree has it into namespace and name."""
    namespace, _, name = tag.rpartition("}")
    return namespace.removeprefix("{"), name
