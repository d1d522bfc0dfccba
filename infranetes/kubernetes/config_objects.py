# SPDX-License-Identifier: Apache-2.0
"""ConfigMaps and Secrets that a pod names in an annotation, from the API server.

What a pod mounts, kubelet brings to the node. This is for what only an annotation names, which the rights of
a kubelet don't cover: the daemon's user needs a Role for it in the pod's namespace.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Protocol
from urllib.parse import quote

from twisted.internet.interfaces import IReactorTime

from infranetes.kubernetes.fields import Fields
from infranetes.kubernetes.requests import Refused, Requests
from infranetes_common import bounded_json
from infranetes_common.concurrency import within
from infranetes_common.errors import InvalidArgument, NotFound, PermissionDenied, Unavailable

ANSWER_SECONDS = 10.0
MAX_OBJECT = 4 << 20  # bytes; an object's data may have 1 MiB, in base64 and with what describes it
KINDS = {"configmap": "configmaps", "secret": "secrets"}


class ConfigObjects(Protocol):
    """A source of ConfigMaps and Secrets."""

    async def of(self, namespace: str, kind: str, name: str) -> Mapping[str, bytes]:
        """Return an object's keys. :param kind: one of KINDS.

        :raise NotFound: there is none. :raise PermissionDenied: the daemon may not read it.
        :raise Unavailable: it can't be read now."""


class ApiServerObjects:
    """The ConfigObjects that asks the API server. No object is kept, and none is in an error."""

    def __init__(self, clock: IReactorTime, server: Requests) -> None:
        self._clock = clock
        self._server = server

    async def of(self, namespace: str, kind: str, name: str) -> Mapping[str, bytes]:
        what = f"{kind} {namespace}/{name}"
        asking = self._ask(namespace, kind, name)
        try:
            answer = await within(self._clock, ANSWER_SECONDS, asking, "the API server's answer")
        except Refused as refused:
            if refused.status == 404:
                raise NotFound(f"there is no {what}") from None
            if refused.status == 403:
                raise PermissionDenied(
                    f"the daemon's user may not read the {what}: mount it in the pod and give the path of "
                    f"the file, or let that user get {KINDS[kind]} in namespace {namespace}"
                ) from None
            raise Unavailable(f"the {what} can't be read: the API server answers {refused.status}") from None
        try:
            return _keys(Fields(bounded_json.loads(answer), what))
        except (ValueError, InvalidArgument):
            raise Unavailable(
                f"the {what} can't be read: the API server's answer is no such object"
            ) from None

    async def _ask(self, namespace: str, kind: str, name: str) -> bytes:
        answer = bytearray()

        def take(piece: bytes) -> None:
            if len(answer) + len(piece) > MAX_OBJECT:
                raise Unavailable(f"the {kind} {namespace}/{name} has over {MAX_OBJECT} bytes")
            answer.extend(piece)

        path = f"/api/v1/namespaces/{quote(namespace, safe='')}/{KINDS[kind]}/{quote(name, safe='')}"
        await self._server.pieces(path, {}, take)
        return bytes(answer)


def _keys(item: Fields) -> dict[str, bytes]:
    """Return the keys of a ConfigMap or Secret. :raise ValueError: it is none."""
    encoded = "data" if item.text("kind") == "Secret" else "binaryData"
    found = {} if encoded == "data" else {key: text.encode() for key, text in item.mapping("data")}
    for key, text in item.mapping(encoded):
        try:
            found[key] = base64.b64decode(text, validate=True)
        except binascii.Error:
            raise ValueError("a value is no base64") from None
    return found
