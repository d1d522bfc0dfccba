# SPDX-License-Identifier: Apache-2.0
"""The token of calls to OpenStack, and where its catalog says that the services are.

libcloud's drivers would each get tokens for themselves, so each thread would, and five times, as a driver has
five connections; before 3.5 none of them forgets a token that was revoked. libcloud takes public endpoints
only, and those only whose service has the name that DevStack gives it. Here all threads share one token in
memory, and endpoints are chosen by their type, region and interface.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from datetime import datetime

import attrs
from libcloud.common.base import ConnectionUserAndKey, Response

from infranetes.providers.cloud.calls.errors import classify
from infranetes.providers.cloud.calls.renewal import Renewed, TimedLease
from infranetes.providers.cloud.interface import CloudError, ErrorKind
from infranetes.providers.cloud.openstack import clouds_file
from infranetes.providers.cloud.openstack.clouds_file import Access
from infranetes.providers.cloud.openstack.connections import Trusting, words_of
from infranetes.providers.cloud.openstack.libcloud_types import Token
from infranetes.providers.cloud.openstack.settings import Settings

_PATH = "/v3/auth/tokens"
SERVICES = ("compute", "network", "image")
VOLUME = "volume"
_VOLUME_TYPES = ("volumev3", "block-storage")  # both are Cinder's types, the second its official one
# Versions in a catalog's URLs, which are replaced by the versions that requests need; Nova's first API knows
# no microversions.
_VERSIONS: Mapping[str, tuple[str, str]] = {
    "compute": (r"/v2(?=/|$)", "/v2.1"),
    "network": (r"/v2\.0$", ""),
    "image": (r"/v2(?:\.\d+)?$", ""),
    VOLUME: (r"/v2(?=/|$)", "/v3"),
}


@attrs.frozen
class KeystoneSession:
    """A token. :ivar endpoints: URLs of SERVICES and, if there is one, of VOLUME."""

    token: str = attrs.field(repr=False)
    endpoints: Mapping[str, str]
    project: str  # its id
    ca_file: str


class _Answer(Response):  # type: ignore[misc]
    """Keystone's answer, of any status."""

    def success(self) -> bool:
        return True


class _Keystone(Trusting, ConnectionUserAndKey):  # type: ignore[misc]
    """Asks for a token."""

    responseCls = _Answer

    def __init__(self, access: Access, timeout: float) -> None:
        self.ca_file = access.ca_file
        super().__init__("-", "-", url=access.auth_url, timeout=timeout)

    def add_default_headers(self, headers: dict[str, str]) -> dict[str, str]:
        return {**headers, "Accept": "application/json", "Content-Type": "application/json"}


class Credentials:
    """Gives the current session. Used in threads."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._session = Renewed("Keystone's token", self._thd_get)

    @property
    def session(self) -> KeystoneSession:
        """The current session. :raise CloudError: there is none; says whether that may pass."""
        return self._session._thd_now()

    def _thd_forget(self, session: KeystoneSession) -> None:
        """Drop a session whose token was refused."""
        self._session._thd_forget(session)

    def _thd_get(self) -> TimedLease[KeystoneSession]:
        try:
            return self._thd_new()
        except Exception as error:
            raise classify(error) from error

    def _thd_new(self) -> TimedLease[KeystoneSession]:
        """Get a token. The file is read anew for each, so replacing it needs no restart of the daemon."""
        settings = self._settings
        access = clouds_file._thd_read(clouds_file.find(settings.clouds_file), settings.cloud)
        begun = time.monotonic()
        connection = _Keystone(access, settings.call_seconds)
        answer = connection.request(_PATH, data=json.dumps(access.request), method="POST")
        if answer.status != 201:
            raise _refused(int(answer.status), str(answer.body))
        try:
            token: Token = json.loads(answer.body)["token"]
            session = KeystoneSession(
                token=str(answer.headers["x-subject-token"]),
                endpoints=endpoints(token, settings.region or access.region, access.interface),
                project=(token.get("project") or {}).get("id", ""),
                ca_file=access.ca_file,
            )
            return TimedLease.of(session, begun, _seconds(token))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            words = f"Keystone's answer is no token ({type(error).__name__})"
            raise CloudError(ErrorKind.TRANSIENT, words) from None


def endpoints(token: Token, region: str, interface: str) -> Mapping[str, str]:
    """Return the URLs of SERVICES, and of VOLUME, in a token's catalog.

    :param region: "": the only one that there is.
    :raise CloudError: one of SERVICES is in none, or one is in several regions; says which."""
    found: dict[str, str] = {}
    for service, types in (*((each, (each,)) for each in SERVICES), (VOLUME, _VOLUME_TYPES)):
        urls = _urls(token, types, interface)
        here = {name: url for name, url in urls.items() if region in ("", name)}
        if not here and service == VOLUME:
            continue
        if len(here) != 1:
            regions = ", ".join(sorted(urls)) or "none"
            raise CloudError(
                ErrorKind.CREDENTIALS,
                f"the catalog has the {interface} endpoint of {service} in these regions: {regions}; "
                "say in clouds.yaml which region_name and interface to use",
            )
        version, replacement = _VERSIONS[service]
        found[service] = re.sub(version, replacement, next(iter(here.values())).rstrip("/"))
    return found


def _urls(token: Token, types: Sequence[str], interface: str) -> Mapping[str, str]:
    """Return the URLs of a service by their regions, as the first of its types has them."""
    for type in types:
        urls = {
            each.get("region_id") or each.get("region") or "": each["url"]
            for entry in token.get("catalog") or ()
            if entry.get("type") == type
            for each in entry.get("endpoints") or ()
            if each.get("interface") == interface
        }
        if urls:
            return urls
    return {}


def _seconds(token: Token) -> float:
    """Seconds for which a token serves, by Keystone's own clock."""
    issued, expires = (datetime.fromisoformat(token[key]) for key in ("issued_at", "expires_at"))
    return (expires - issued).total_seconds()


def _refused(status: int, body: str) -> CloudError:
    message = f"Keystone gives no token: {status} {words_of(body)}".rstrip()
    if status == 429:
        return CloudError(ErrorKind.THROTTLED, message)
    return CloudError(ErrorKind.TRANSIENT if status >= 500 else ErrorKind.CREDENTIALS, message)
