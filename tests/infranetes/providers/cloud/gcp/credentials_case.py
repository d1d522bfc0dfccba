# SPDX-License-Identifier: Apache-2.0
"""A node that obtains tokens from Google."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from infranetes.providers.cloud.gcp.credentials import SCOPE, Credentials
from infranetes.providers.cloud.gcp.settings import Settings
from infranetes.providers.cloud.interface import CloudError, ErrorKind
from tests.contract.pod_provider_case import reactor
from tests.support.clouds.google_identity import GoogleIdentity, Holder, write

_KEPT_APART = ("GOOGLE_", "CLOUDSDK_", "GCE_", "AWS_", "BOTO_")
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


class CredentialsCase(TestCase):
    """A node without anyone's sign-in; its environment has only what a test puts there."""

    async def setUp(self) -> None:
        self.identity = GoogleIdentity()
        self.identity.start(reactor)
        self.addCleanup(self.identity.stop)
        self.directory = Path(self.mktemp()).absolute()
        (self.directory / "gcloud").mkdir(parents=True)
        kept = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(_KEPT_APART) and key.lower() not in _PROXIES
        }
        kept["CLOUDSDK_CONFIG"] = str(self.directory / "gcloud")
        patched = mock.patch.dict(os.environ, kept, clear=True)
        patched.start()
        self.addCleanup(patched.stop)
        self.product = self.directory / "product_name"

    def tearDown(self) -> None:
        self.assertEqual(self.identity.malformed, [])

    def credentials(self, content: Any = None, scope: str = SCOPE, **settings: Any) -> Credentials:
        """Return a daemon's credentials. :param content: the content of its file."""
        if content is not None:
            settings["key_file"] = str(write(self.directory / "key.json", content))
        given = {"token_endpoint": self.identity.url, "call_seconds": 15.0, **settings}
        table = Settings(project="test-project", zones=("europe-west1-b",), image="family/x", **given)
        return Credentials(table, scope, self.product)

    async def now(self, credentials: Credentials) -> Holder:
        """Return the holder of the current token."""
        return self.identity.tokens[await deferToThread(lambda: credentials.access_token)]

    async def refused(self, credentials: Credentials, kind: ErrorKind) -> str:
        """Check that no token can be had. Return the error's message."""
        with self.assertRaises(CloudError) as caught:
            await self.now(credentials)
        error = caught.exception
        self.assertIs(error.kind, kind, str(error))
        self.assertNotIn("hush", str(error))
        return str(error)
