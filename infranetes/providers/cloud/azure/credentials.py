# SPDX-License-Identifier: Apache-2.0
"""The credentials of calls to Azure, by which tokens are asked for:

- the managed identity of the VM that the node is, from its metadata service
- an application's secret (source: "Microsoft identity platform and the OAuth 2.0 client credentials flow")
- a token of another issuer that the application trusts, such as of a Kubernetes service account or of GitHub
  (the same source, "Access token request with a federated credential")

libcloud knows the second only; each of its connections would get a token, and so would each thread. Here all
threads share one, in memory.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import TypedDict
from urllib.parse import urlencode

from libcloud.common.azure_arm import publicEnvironments
from libcloud.common.base import Connection, JsonResponse
from libcloud.common.exceptions import BaseHTTPError

from infranetes.providers.cloud.azure.secret_files import thd_read
from infranetes.providers.cloud.azure.settings import Settings
from infranetes.providers.cloud.calls.connections import close_sockets, connection_arguments
from infranetes.providers.cloud.calls.errors import classify, message_of, retry_after
from infranetes.providers.cloud.calls.renewal import RenewedToken, TimedLease
from infranetes.providers.cloud.interface import CloudError, ErrorKind

_METADATA = "http://169.254.169.254"
_METADATA_PATH = "/metadata/identity/oauth2/token"
_METADATA_VERSION = "2018-02-01"
_ASSERTION = "urn:ietf:params:oauth:client-assertion-type:jwt-bearer"
# Statuses of temporary refusals; the metadata service answers 410 while it is being updated.
_PASSING = (408, 410, 429)


class _Environment(TypedDict):
    """The part of libcloud's table of Azure's clouds that is used here."""

    resourceManagerEndpointUrl: str
    activeDirectoryEndpointUrl: str


def environment(name: str) -> _Environment:
    """Return where one of Azure's clouds is. :param name: as in `Settings.environment`."""
    found: _Environment = publicEnvironments["default" if name == "AzureCloud" else name]
    return found


class _Answer(TypedDict, total=False):
    """A new token, as Azure answers; the metadata service gives numbers as text."""

    access_token: str
    expires_in: str | float


class _Response(JsonResponse):  # type: ignore[misc]
    """An answer of the token service, whose errors have another form than Resource Manager's."""

    def parse_error(self) -> str:
        try:
            said = json.loads(self.body)
            return str(said.get("error_description") or said["error"]).splitlines()[0][:200]
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            return f"status {self.status}"


class _TokenService(Connection):  # type: ignore[misc]
    responseCls = _Response


class Credentials(RenewedToken):
    """The token of calls to Azure. Used in threads."""

    def __init__(self, settings: Settings) -> None:
        super().__init__("Azure's token", self._thd_ask_for_token)
        self._settings = settings
        where = environment(settings.environment)
        self._resource = where["resourceManagerEndpointUrl"].rstrip("/")
        self._login = (settings.login_endpoint or where["activeDirectoryEndpointUrl"]).rstrip("/")
        self._metadata = (settings.metadata_endpoint or _METADATA).rstrip("/")

    def _thd_ask_for_token(self) -> TimedLease[str]:
        """Get a token. Files are read anew for each, so replacing one needs no restart of the daemon."""
        settings, begun = self._settings, time.monotonic()
        try:
            if settings.secret_file:
                answer = self._thd_log_in({"client_secret": thd_read(settings.secret_file, "secret_file")})
            elif settings.federated_token_file:
                assertion = thd_read(settings.federated_token_file, "federated_token_file")
                answer = self._thd_log_in(
                    {"client_assertion_type": _ASSERTION, "client_assertion": assertion}
                )
            else:
                answer = self._thd_by_metadata()
            text, seconds = str(answer["access_token"]), float(answer.get("expires_in", 0))
        except BaseHTTPError as error:
            passes = int(error.code) >= 500 or int(error.code) in _PASSING
            kind = ErrorKind.TRANSIENT if passes else ErrorKind.CREDENTIALS
            words = f"Azure gives no token: {message_of(error)}"
            raise CloudError(kind, words, retry_after(error)) from error
        except (KeyError, TypeError, ValueError) as error:
            raise CloudError(ErrorKind.CREDENTIALS, f"no token: {type(error).__name__}") from error
        except Exception as error:
            raise classify(error) from error
        return TimedLease.of(text, begun, seconds)

    def _thd_log_in(self, proof: Mapping[str, str]) -> _Answer:
        form = {
            "grant_type": "client_credentials",
            "client_id": self._settings.client_id,
            "scope": f"{self._resource}/.default",
            **proof,
        }
        return self._thd_ask(
            self._login,
            "POST",
            f"/{self._settings.tenant}/oauth2/v2.0/token",
            {"Content-Type": "application/x-www-form-urlencoded"},
            data=urlencode(form),
        )

    def _thd_by_metadata(self) -> _Answer:
        query = {"api-version": _METADATA_VERSION, "resource": f"{self._resource}/"}
        if self._settings.client_id:
            query["client_id"] = self._settings.client_id
        path = f"{_METADATA_PATH}?{urlencode(query)}"
        return self._thd_ask(self._metadata, "GET", path, {"Metadata": "true"})

    def _thd_ask(
        self, endpoint: str, method: str, path: str, headers: Mapping[str, str], data: str | None = None
    ) -> _Answer:
        service = _TokenService(timeout=self._settings.call_seconds, **connection_arguments(endpoint))
        service.connect()
        try:
            answer: _Answer = service.request(
                path, method=method, headers=dict(headers), data=data, retry_failed=False
            ).object
            return answer
        finally:
            close_sockets(service)
