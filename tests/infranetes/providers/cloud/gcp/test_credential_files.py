# SPDX-License-Identifier: Apache-2.0
"""Which of Google's credential files are accepted, and the errors about others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from infranetes.providers.cloud.gcp.credential_files import _thd_read
from infranetes.providers.cloud.gcp.identities import (
    AwsToken,
    ExternalAccount,
    FileToken,
    Identity,
    Impersonated,
    UrlToken,
)
from infranetes.providers.cloud.interface import CloudError, ErrorKind
from tests.support.clouds.google_identity import (
    ACCOUNT,
    VERIFICATION,
    GoogleIdentity,
    impersonation_url,
    write,
)

OIDC = {"url": "http://169.254.169.254/token?secret=hush", "headers": {"Metadata": "True"}}
FIELD = {"type": "json", "subject_token_field_name": "value"}
IMPERSONATED = {
    "type": "impersonated_service_account",
    "service_account_impersonation_url": impersonation_url(ACCOUNT),
}


class CredentialFileTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.identity = GoogleIdentity()
        self.file = Path(self.mktemp())

    def read(self, content: Any, mode: int = 0o600) -> Identity:
        """Return the identity in a file."""
        return _thd_read(write(self.file, content, mode), "key_file")

    def refused(self, content: Any, mode: int = 0o600) -> str:
        """Check that a file is refused. Return the error's message."""
        with self.assertRaises(CloudError) as caught:
            self.read(content, mode)
        self.assertIs(caught.exception.kind, ErrorKind.CREDENTIALS)
        words = str(caught.exception)
        self.assertIn(f"key_file {self.file}", words)
        self.assertNotIn("hush", words)
        return words

    def external(self, source: Any, **more: Any) -> dict[str, Any]:
        """Return a file with an external issuer's identity."""
        return {**self.identity.external(source), **more}

    def test_where_other_issuers_tokens_are(self) -> None:
        for source, subject in (
            ({"file": "/run/token"}, FileToken("/run/token")),
            ({"file": "/run/token", "format": {"type": "text"}}, FileToken("/run/token")),
            ({"file": "/run/token", "format": FIELD}, FileToken("/run/token", "value")),
            (OIDC, UrlToken(OIDC["url"], {"Metadata": "True"})),  # type: ignore[arg-type]
            (self.identity.aws_source(), AwsToken(VERIFICATION)),
        ):
            found = self.read(self.external(source))
            assert isinstance(found, ExternalAccount)
            self.assertEqual(found.subject, subject)

    def test_nothing_secret_is_shown(self) -> None:
        user = self.identity.sign_in()
        for content in (self.identity.key(), user, {**IMPERSONATED, "source_credentials": user}):
            words = repr(self.read(content))
            self.assertNotIn("hush", words)
            self.assertNotIn("PRIVATE KEY", words)
        url = self.external({"url": "https://x/", "headers": {"Authorization": "hush"}})
        self.assertNotIn("hush", repr(self.read(url)))

    def test_programs_are_refused_with_what_to_do_instead(self) -> None:
        words = self.refused(self.external({"executable": {"command": "/usr/bin/hush"}}))
        self.assertIn("credential_source.executable is refused", words)
        self.assertIn("name that as credential_source.file", words)

    def test_tokens_are_asked_for_at_google_alone(self) -> None:
        for url in (
            "http://sts.googleapis.com/v1/token",
            "https://sts.googleapis.com.example.com/v1/token",
            "https://hush@example.com/sts.googleapis.com/v1/token",
            "https://example.com/.googleapis.com/v1/token",
            "https://sts.googleapis.com/v1/token?x=hush",
            "https://sts.googleapis.com:8443/v1/token",
        ):
            words = self.refused(self.external({"file": "x"}, token_url=url))
            self.assertIn("token_url is not one of Google's", words)
            stolen = impersonation_url(ACCOUNT).replace("https://iamcredentials.googleapis.com", url[:-9])
            found = {**IMPERSONATED, "source_credentials": self.identity.sign_in()}
            for content in (found, self.external({"file": "x"})):
                words = self.refused({**content, "service_account_impersonation_url": stolen})
                self.assertIn("service_account_impersonation_url is not one of Google's", words)
        for url in ("https://sts.googleapis.com/v1/token", "https://sts-nodes.p.googleapis.com/v1/token"):
            self.read(self.external({"file": "x"}, token_url=url))

    def test_aws_is_asked_at_aws_alone(self) -> None:
        source = self.identity.aws_source()
        for url in (
            "https://example.com/{region}",
            "https://sts.{region}.amazonaws.com.example.com?Action=x",
        ):
            words = self.refused(self.external({**source, "regional_cred_verification_url": url}))
            self.assertIn("is not AWS' of version 1", words)
        self.assertIn("version 1", self.refused(self.external({**source, "environment_id": "aws2"})))

    def test_what_is_wrong_is_said(self) -> None:
        key, user = self.identity.key(), self.identity.sign_in()
        lifetime = {"service_account_impersonation": {"token_lifetime_seconds": 60}}
        impersonated = self.identity.external({"file": "x"}, ACCOUNT)
        people = "//iam.googleapis.com/locations/global/workforcePools/people/providers/ours"
        for content, words in (
            ([], "no JSON object"),
            ({"type": "hush"}, "its type is none of"),
            ({"type": ["hush"]}, "its type is none of"),
            ({**key, "private_key": "hush"}, "private_key is no key"),
            ({**key, "client_email": 7}, "client_email is missing"),
            ({**user, "refresh_token": ""}, "refresh_token is missing"),
            (self.external({"file": "x"}, audience=people), "for people"),
            (self.external("hush"), "credential_source is missing"),
            (self.external({"certificate": {}}), "certificates are not supported"),
            (self.external({"url": "file:///etc/hush"}), "credential_source.url is no URL"),
            (self.external({"url": "https://hush@x/"}), "credential_source.url is no URL"),
            (self.external({"url": "https://x/", "headers": {"a": "hush\nb"}}), "headers"),
            (self.external({"url": "https://x/", "headers": ["hush"]}), "headers"),
            (self.external({"file": "x", "format": {"type": "xml"}}), "neither text nor json"),
            (self.external({"file": "x", "format": {"type": "json"}}), "subject_token_field_name"),
            ({**impersonated, **lifetime}, "between 600 and 43200"),
            ({**IMPERSONATED, "source_credentials": user, "delegates": ["hush/x"]}, "delegates"),
            ({**IMPERSONATED, "source_credentials": {**IMPERSONATED}}, "of another type"),
        ):
            self.assertIn(words, self.refused(content))

    def test_secrets_that_others_may_read_are_refused(self) -> None:
        user = self.identity.sign_in()
        with_header = {"url": "https://x/", "headers": {"authorization": "hush"}}
        for content in (
            self.identity.key(),
            user,
            {**IMPERSONATED, "source_credentials": user},
            self.external(with_header),
        ):
            self.assertIn("may be read by others (mode 0640): chmod 600 it", self.refused(content, 0o640))

    def test_where_a_token_is_may_be_read_by_all_and_changed_by_none(self) -> None:
        found = self.read(self.identity.external({"file": "x"}, ACCOUNT), 0o644)
        self.assertIsInstance(found, Impersonated)
        self.read(self.external(OIDC), 0o644)
        words = self.refused(self.external({"file": "x"}), 0o664)
        self.assertIn("may be changed by others (mode 0664): chmod 644 it", words)

    def test_a_file_that_is_too_long_is_not_read_to_its_end(self) -> None:
        self.file.write_text(json.dumps({**self.identity.key(), "x": "hush" * 100_000}))
        self.file.chmod(0o600)
        with self.assertRaises(CloudError):
            _thd_read(self.file, "key_file")
