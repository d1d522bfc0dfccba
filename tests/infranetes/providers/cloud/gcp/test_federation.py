# SPDX-License-Identifier: Apache-2.0
"""Google's tokens for other issuers' identities, and for impersonated service accounts."""

from __future__ import annotations

import json
import os
from typing import Any

from infranetes.providers.cloud.gcp.credentials import SCOPE
from infranetes.providers.cloud.interface import ErrorKind
from tests.contract.pod_provider_case import reactor
from tests.harness.needs import tool
from tests.infranetes.providers.cloud.gcp.credentials_case import CredentialsCase
from tests.support.clouds.aws_identity import AwsIdentity
from tests.support.clouds.google_identity import (
    ACCOUNT,
    OIDC,
    PERSON,
    PLATFORM,
    POOL,
    SIGN_IN,
    Holder,
    impersonation_url,
)
from tests.support.modules import replaced

NEEDS = (tool("wheels"),)

OTHER = "other@test-project.iam.gserviceaccount.com"
IAM = f"/v1/projects/-/serviceAccounts/{ACCOUNT}:generateAccessToken"


class FederationTests(CredentialsCase):
    """Another issuer's identity, through a workload identity pool."""

    async def setUp(self) -> None:
        await super().setUp()
        self.identity.subjects["hush.payload.signature"] = "node-1"
        self.token = self.directory / "token"
        self.token.write_text("hush.payload.signature\n")

    async def test_a_token_in_a_file_is_exchanged(self) -> None:
        credentials = self.credentials(self.identity.external({"file": str(self.token)}))
        self.assertEqual(await self.now(credentials), Holder(f"{POOL}node-1", SCOPE))
        self.assertEqual(self.identity.asked, ["/v1/token"])

    async def test_a_token_in_a_field_of_a_file_is_exchanged(self) -> None:
        format = {"type": "json", "subject_token_field_name": "id_token"}
        credentials = self.credentials(self.identity.external({"file": str(self.token), "format": format}))
        words = await self.refused(credentials, ErrorKind.TRANSIENT)  # the file is being written
        self.assertIn("has no token in its field id_token", words)
        self.token.write_text(json.dumps({"id_token": "hush.payload.signature"}))
        self.assertEqual((await self.now(credentials)).name, f"{POOL}node-1")

    async def test_a_token_from_a_url_is_exchanged(self) -> None:
        source = {
            "url": f"{self.identity.url}{OIDC}?audience=hush",
            "headers": {"Authorization": "Bearer hush-url"},
            "format": {"type": "json", "subject_token_field_name": "value"},
        }
        credentials = self.credentials(self.identity.external(source))
        with self.identity.refusing(503, b"hush", OIDC):
            await self.refused(credentials, ErrorKind.TRANSIENT)
        with self.identity.refusing(404, b"hush", OIDC):
            await self.refused(credentials, ErrorKind.CREDENTIALS)
        self.assertEqual((await self.now(credentials)).name, f"{POOL}node-1")

    async def test_a_missing_token_file_is_named(self) -> None:
        self.token.unlink()
        credentials = self.credentials(self.identity.external({"file": str(self.token)}))
        self.assertIn(str(self.token), await self.refused(credentials, ErrorKind.CREDENTIALS))
        self.assertEqual(self.identity.asked, [])

    async def test_a_stale_token_passes_as_its_issuer_writes_the_next_one(self) -> None:
        self.token.write_text("hush.stale.signature")
        self.identity.stale.add("hush.stale.signature")
        credentials = self.credentials(self.identity.external({"file": str(self.token)}))
        self.assertIn("is stale to sign-in", await self.refused(credentials, ErrorKind.TRANSIENT))
        self.token.write_text("hush.payload.signature")
        self.assertEqual((await self.now(credentials)).name, f"{POOL}node-1")

    async def test_a_pool_that_trusts_others_says_so(self) -> None:
        self.token.write_text("hush.other.signature")
        credentials = self.credentials(self.identity.external({"file": str(self.token)}))
        words = await self.refused(credentials, ErrorKind.CREDENTIALS)
        self.assertIn("The credential (hidden) can't be verified", words)
        self.assertIn("have the provider of the workload identity pool trust", words)

    async def test_what_passes_is_not_for_good(self) -> None:
        credentials = self.credentials(self.identity.external({"file": str(self.token)}))
        with self.identity.refusing(503):
            await self.refused(credentials, ErrorKind.TRANSIENT)
        await self.identity.stop()
        await self.refused(credentials, ErrorKind.TRANSIENT)
        self.identity.start(reactor)
        credentials = self.credentials(self.identity.external({"file": str(self.token)}))
        self.assertEqual((await self.now(credentials)).name, f"{POOL}node-1")


class AwsTests(CredentialsCase):
    """A node's role in AWS, through a workload identity pool."""

    async def setUp(self) -> None:
        await super().setUp()
        self.aws = AwsIdentity(reactor)
        self.aws.start()
        self.addCleanup(self.aws.stop)
        self.identity.aws_keys["ASIAONE"] = "hush"
        os.environ.update(
            AWS_CONFIG_FILE=str(self.directory / "config"),
            AWS_SHARED_CREDENTIALS_FILE=str(self.directory / "credentials"),
            AWS_EC2_METADATA_SERVICE_ENDPOINT=self.aws.url,
        )

    async def test_the_instances_role_is_exchanged_where_it_is(self) -> None:
        self.aws.add_role("ASIAONE")
        self.aws.documents["meta-data/placement/availability-zone/"] = b"eu-west-1b"
        credentials = self.credentials(self.identity.external(self.identity.aws_source(), ACCOUNT))
        principal = f"{POOL}arn:aws:sts::123456789012:assumed-role/node/ASIAONE"
        self.identity.impersonators.add((principal, ACCOUNT))
        with self.aws.refusing(503):
            await self.refused(credentials, ErrorKind.TRANSIENT)
        self.assertEqual(await self.now(credentials), Holder(ACCOUNT, SCOPE))

    async def test_keys_of_the_environment_are_exchanged(self) -> None:
        os.environ.update(
            AWS_ACCESS_KEY_ID="ASIAONE", AWS_SECRET_ACCESS_KEY="wrong-hush", AWS_REGION="us-east-1"
        )
        credentials = self.credentials(self.identity.external(self.identity.aws_source()))
        await self.refused(credentials, ErrorKind.CREDENTIALS)
        os.environ.update(AWS_SECRET_ACCESS_KEY="hush", AWS_SESSION_TOKEN="token")
        self.assertIn("ASIAONE", (await self.now(credentials)).name)

    async def test_without_botocore_it_says_so(self) -> None:
        credentials = self.credentials(self.identity.external(self.identity.aws_source()))
        with replaced("botocore.auth", None):
            self.assertIn("python3-botocore", await self.refused(credentials, ErrorKind.CREDENTIALS))


class ImpersonationTests(CredentialsCase):
    """A service account, used by an identity that may impersonate it."""

    async def setUp(self) -> None:
        await super().setUp()
        self.identity.sign_ins.add(SIGN_IN)

    def file(self, **more: Any) -> dict[str, Any]:
        """Return what `gcloud auth application-default login --impersonate-service-account` leaves."""
        return {
            "type": "impersonated_service_account",
            "service_account_impersonation_url": impersonation_url(ACCOUNT),
            "source_credentials": self.identity.sign_in(),
            **more,
        }

    async def test_a_person_may(self) -> None:
        credentials = self.credentials(self.file(), f"{SCOPE} x")
        words = await self.refused(credentials, ErrorKind.CREDENTIALS)
        self.assertIn(f"IAM, asked for a token of {ACCOUNT}, answers 403", words)
        self.assertIn("give the calling account the role iam.serviceAccountTokenCreator", words)
        self.identity.impersonators.add((PERSON, ACCOUNT))
        with self.identity.refusing(503, b"", IAM):
            await self.refused(credentials, ErrorKind.TRANSIENT)
        self.assertEqual(await self.now(credentials), Holder(ACCOUNT, f"{SCOPE} x"))

    async def test_by_others_between(self) -> None:
        self.identity.impersonators |= {(PERSON, OTHER), (OTHER, ACCOUNT)}
        credentials = self.credentials(self.file(delegates=[OTHER]))
        self.assertEqual((await self.now(credentials)).name, ACCOUNT)

    async def test_another_issuers_identity_may_for_as_long_as_its_file_says(self) -> None:
        self.identity.subjects["hush.payload.signature"] = "node-1"
        (self.directory / "token").write_text("hush.payload.signature")
        self.identity.impersonators.add((f"{POOL}node-1", ACCOUNT))
        lifetime = {"service_account_impersonation": {"token_lifetime_seconds": 1200}}
        source = {"file": str(self.directory / "token")}
        credentials = self.credentials(self.identity.external(source, ACCOUNT, **lifetime))
        self.assertEqual(await self.now(credentials), Holder(ACCOUNT, SCOPE))
        self.assertEqual(self.identity.asked, ["/v1/token", IAM])
        self.assertEqual(self.identity.lifetimes, ["1200s"])

    async def test_the_configuration_may_name_it_for_whatever_was_found(self) -> None:
        self.identity.impersonators.add((ACCOUNT, OTHER))
        credentials = self.credentials(impersonated_account=OTHER)
        words = await self.refused(credentials, ErrorKind.CREDENTIALS)
        self.assertIn("scope cloud-platform", words)  # this instance lacks the scope
        self.identity.metadata_scope = PLATFORM
        self.assertEqual(await self.now(credentials), Holder(OTHER, SCOPE))
        by_key = self.credentials(self.identity.key(), impersonated_account=OTHER)
        self.assertEqual(await self.now(by_key), Holder(OTHER, SCOPE))
