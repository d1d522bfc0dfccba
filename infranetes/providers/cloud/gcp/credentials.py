# SPDX-License-Identifier: Apache-2.0
"""The credentials of calls to Google.

A file of the configuration, or else what Google's own tools find: the file that
GOOGLE_APPLICATION_CREDENTIALS names, gcloud's own, or the service account of the instance that the node is.
They may impersonate another service account.

libcloud knows neither other issuers' identities nor impersonation; each of its drivers would get a token, so
each thread would, keep it in a file in the home directory, and validate the key each time, which stops all
threads for up to 80 ms. Here all threads share one token in memory, and Google's key is not validated.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from infranetes.providers.cloud.calls.renewal import RenewedToken, TimedLease
from infranetes.providers.cloud.gcp.credential_files import _thd_read
from infranetes.providers.cloud.gcp.identities import AttachedAccount, Identity, impersonated
from infranetes.providers.cloud.gcp.settings import Settings
from infranetes.providers.cloud.gcp.token_requests import TokenRequests, broken
from infranetes.providers.cloud.gcp.tokens import _thd_token

SCOPE = "https://www.googleapis.com/auth/compute"
_ENVIRONMENT = "GOOGLE_APPLICATION_CREDENTIALS"
_GCLOUD = "application_default_credentials.json"
_PRODUCT = Path("/sys/class/dmi/id/product_name")


class Credentials(RenewedToken):
    """The token of calls to Google. Used in threads.

    :param scope: what the token is for; scopes are separated by spaces.
    :param product_file: the file that names this machine's product.
    """

    def __init__(self, settings: Settings, scope: str = SCOPE, product_file: Path = _PRODUCT) -> None:
        super().__init__("Google's token", self._thd_ask_for_token)
        self._scope = scope
        self._key_file = settings.key_file
        self._impersonated = settings.impersonated_account
        # Up to three services are asked for one token. What fails is tried again by `calls.Calls`.
        self._requests = TokenRequests(settings.token_endpoint, max(settings.call_seconds / 3, 1.0))
        self._product_file = product_file

    def _thd_ask_for_token(self) -> TimedLease[str]:
        """Get a token. Files are read anew for each, so repairing or replacing one needs no restart of the
        daemon."""
        begun = time.monotonic()
        who = self._thd_identity()
        if self._impersonated:
            who = impersonated(self._impersonated, who)
        token = _thd_token(who, self._scope, self._requests)
        return TimedLease.of(token.text, begun, token.seconds)

    def _thd_identity(self) -> Identity:
        """Find out who asks. Source: "How Application Default Credentials works"."""
        if self._key_file:
            return _thd_read(Path(self._key_file), "key_file")
        named = os.environ.get(_ENVIRONMENT)
        if named:
            return _thd_read(Path(named), _ENVIRONMENT)
        directory = os.environ.get("CLOUDSDK_CONFIG") or os.path.expanduser("~/.config/gcloud")
        file = Path(directory, _GCLOUD)
        if file.is_file():
            return _thd_read(file, "gcloud's")
        if self._is_instance():
            return AttachedAccount()
        raise broken(
            f"neither key_file nor {_ENVIRONMENT} names any, gcloud has left none in {file}, and this "
            "machine is no instance of Compute Engine"
        )

    def _is_instance(self) -> bool:
        """Return whether there is a metadata server to ask; true where this can't be known."""
        if self._requests.endpoint or os.environ.get("GCE_METADATA_HOST"):
            return True
        try:
            return self._product_file.read_text().startswith("Google")
        except OSError:
            return True
