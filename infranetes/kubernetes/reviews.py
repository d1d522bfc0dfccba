# SPDX-License-Identifier: Apache-2.0
"""Who shows a token, and what they may do in the cluster: the API server is asked, as kubelet asks it."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from typing import TypeVar

import attrs
from twisted.internet.interfaces import IReactorTime

from infranetes.kubernetes.requests import Refused
from infranetes_common.errors import PermissionDenied, ResourceExhausted, Unauthenticated, Unavailable

TOKENS = "/apis/authentication.k8s.io/v1/tokenreviews"
ACCESS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
MAX_TOKEN = 8192
KEPT_SECONDS, MOST_KEPT = 10.0, 256  # for how long an answer counts, and how many are remembered
MOST_ASKED = 16  # questions at a time: a flood of tokens must not become one of the API server

Ask = Callable[[str, object], Awaitable[bytes]]
"""Creates a review, and returns the API server's answer."""
_T = TypeVar("_T")


@attrs.frozen
class User:
    """A user as the API server knows it. :ivar document: as a SubjectAccessReview names it, in JSON."""

    name: str
    document: str


@attrs.frozen
class Wish:
    """What somebody wants to do with pods. :ivar namespace: "": with those of all."""

    verb: str
    namespace: str
    name: str = ""
    subresource: str = ""

    def __str__(self) -> str:
        what = f"pods/{self.subresource}" if self.subresource else "pods"
        of = f" {self.name}" if self.name else ""
        where = f"in the namespace {self.namespace}" if self.namespace else "of all namespaces"
        return f"{self.verb} {what}{of} {where}"


class Reviewer:
    """Asks who somebody is and what they may.

    :param audience: the audience that tokens have to be made for. A token for the API server itself is
        refused before it is looked at: nobody is to get into the habit of sending those to nodes.
    """

    def __init__(self, clock: IReactorTime, ask: Ask, audience: str) -> None:
        self._clock = clock
        self._ask = ask
        self._audience = audience
        self._asked = 0
        self._kept: OrderedDict[Hashable, tuple[float, object]] = OrderedDict()

    async def user(self, token: str) -> User:
        """Return whose token this is.

        :raise Unauthenticated: nobody's, or it is for another audience.
        :raise Unavailable: that can't be asked. :raise ResourceExhausted: too many are asked about."""
        if not token or len(token) > MAX_TOKEN or self._audience not in audiences(token):
            raise Unauthenticated(
                f"a token of a service account for the audience {self._audience!r} is needed: kubectl create "
                f"token NAME --audience {self._audience}"
            )
        key = "user", hashlib.sha256(token.encode()).digest()
        kept = self._remembered(key)
        if isinstance(kept, User):
            return kept
        spec = {"token": token, "audiences": [self._audience]}
        status = await self._review("authentication.k8s.io/v1", "TokenReview", TOKENS, spec)
        found = status.get("user")
        granted = status.get("audiences")
        if status.get("authenticated") is not True or not isinstance(found, dict):
            raise Unauthenticated("the API server does not know this token (any more)")
        if not isinstance(granted, list) or self._audience not in granted:
            raise Unauthenticated(f"the token is not for the audience {self._audience!r}")
        its = {
            "user": found.get("username", ""),
            "uid": found.get("uid", ""),
            "groups": found.get("groups", []),
            "extra": found.get("extra", {}),
        }
        return self._keep(key, User(str(its["user"]), json.dumps(its, sort_keys=True)))

    async def check(self, user: User, wish: Wish) -> None:
        """Check that somebody may do this.

        :raise PermissionDenied: not. :raise Unavailable: that can't be asked.
        :raise ResourceExhausted: too much is asked about."""
        key = "may", user, wish
        allowed = self._remembered(key)
        if allowed is None:
            attributes = {
                "version": "v1",
                "resource": "pods",
                "verb": wish.verb,
                "namespace": wish.namespace,
                "name": wish.name,
                "subresource": wish.subresource,
            }
            spec = {**json.loads(user.document), "resourceAttributes": attributes}
            status = await self._review("authorization.k8s.io/v1", "SubjectAccessReview", ACCESS, spec)
            denied = status.get("denied") is True
            allowed = self._keep(key, status.get("allowed") is True and not denied)
        if not allowed:
            raise PermissionDenied(f"{user.name} may not {wish}: a Role or ClusterRole has to allow it")

    async def _review(self, version: str, kind: str, path: str, spec: object) -> dict[str, object]:
        """Create a review; return its status."""
        if self._asked >= MOST_ASKED:
            raise ResourceExhausted("the API server is asked about as many clients as may be: try again")
        self._asked += 1
        try:
            answer = json.loads(await self._ask(path, {"apiVersion": version, "kind": kind, "spec": spec}))
        except Refused as error:
            raise Unavailable(
                f"the API server lets the daemon make no {kind} ({error.status}): its identity needs "
                "system:auth-delegator"
            ) from None
        except ValueError:
            raise Unavailable(f"the API server's {kind} can't be read") from None
        finally:
            self._asked -= 1
        status = answer.get("status") if isinstance(answer, dict) else None
        return status if isinstance(status, dict) else {}

    def _remembered(self, key: Hashable) -> object:
        until, found = self._kept.get(key, (0.0, None))
        return found if self._clock.seconds() < until else None

    def _keep(self, key: Hashable, found: _T) -> _T:
        self._kept.pop(key, None)
        self._kept[key] = self._clock.seconds() + KEPT_SECONDS, found
        while len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)
        return found


def audiences(token: str) -> list[str]:
    """Return the audiences that a token says it is for. Whether that is true only the API server knows."""
    parts = token.split(".")
    if len(parts) != 3 or not token.isascii():
        return []
    try:
        claims = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
    except (binascii.Error, ValueError, RecursionError):
        return []
    found = claims.get("aud") if isinstance(claims, dict) else None
    given = found if isinstance(found, list) else [found]
    return [each for each in given if isinstance(each, str)]
