# SPDX-License-Identifier: Apache-2.0
"""Where the real botocore finds AWS credentials, and how failures on the way are reported."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any
from unittest import mock

from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from infranetes.providers.cloud.aws.credentials import Credentials, Keys
from infranetes.providers.cloud.interface import CloudError, ErrorKind
from tests.contract.pod_provider_case import reactor
from tests.support.clouds.aws_identity import AwsIdentity, until
from tests.support.clouds.moto import REGION
from tests.support.waiting import until as until_true

ROLE = "arn:aws:iam::123456789012:role/node"
HOUR = 3600.0


class CredentialsCase(TestCase):
    """A node with AWS files of its own; its environment has only what a test puts there."""

    async def setUp(self) -> None:
        self.identity = AwsIdentity(reactor)
        self.identity.start()
        self.addCleanup(self.identity.stop)
        self.directory = Path(self.mktemp()).absolute()
        self.directory.mkdir()
        self.files = {
            "AWS_CONFIG_FILE": str(self.directory / "config"),
            "AWS_SHARED_CREDENTIALS_FILE": str(self.directory / "credentials"),
            "AWS_DATA_PATH": str(self.identity.endpoints(self.directory / "models")),
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("AWS_", "BOTO_"))}
        patched = mock.patch.dict(os.environ, {**kept, **self.files}, clear=True)
        patched.start()
        self.addCleanup(patched.stop)
        self.vendor = self.directory / "sys_vendor"

    def environment(self, **variables: str) -> None:
        """Set variables of the environment."""
        os.environ.update(variables)

    def config(self, *lines: str) -> None:
        """Write AWS' configuration file."""
        (self.directory / "config").write_text("\n".join(lines) + "\n")

    def credentials(self, profile: str = "") -> Credentials:
        """Return a daemon's credentials."""
        return Credentials("", "", profile, REGION, timeout=60.0, vendor_file=self.vendor)

    async def now(self, credentials: Credentials) -> Keys:
        """Return the current keys."""
        return await deferToThread(credentials._thd_now)

    async def refused(self, credentials: Credentials, kind: ErrorKind) -> str:
        """Check that there are no credentials. Return the error's message."""
        with self.assertRaises(CloudError) as caught:
            await self.now(credentials)
        error = caught.exception
        self.assertIs(error.kind, kind, str(error))
        self.assertNotIn("hush", str(error))
        return str(error)


class WebIdentityTests(CredentialsCase):
    """A pod's service account, as EKS provides it to containers, with moto's STS."""

    async def setUp(self) -> None:
        await super().setUp()
        self.token = self.directory / "token"
        self.token.write_text("header.payload.signature")
        self.environment(AWS_ROLE_ARN=ROLE, AWS_WEB_IDENTITY_TOKEN_FILE=str(self.token))

    async def test_it_is_exchanged_for_keys_that_end(self) -> None:
        credentials = self.credentials()
        keys = await self.now(credentials)
        self.assertTrue(keys.access_key.startswith("ASIA"), keys.access_key)
        self.assertTrue(keys.token)
        self.assertEqual(await self.now(credentials), keys)
        self.assertEqual(self.identity.asked, ["/"])

    async def test_what_passes_is_not_for_good(self) -> None:
        credentials = self.credentials()
        with self.identity.refusing(503):
            await self.refused(credentials, ErrorKind.TRANSIENT)
        for code in ("IDPCommunicationError", "ExpiredTokenException", "Throttling"):
            answer = f"<ErrorResponse><Error><Code>{code}</Code><Message>no</Message></Error></ErrorResponse>"
            with self.identity.refusing(400, answer.encode()):
                self.assertIn(code, await self.refused(credentials, ErrorKind.TRANSIENT))
        self.assertTrue((await self.now(credentials)).token)

    async def test_a_server_that_is_not_there_passes(self) -> None:
        credentials = self.credentials()
        await self.identity.stop()
        self.assertIn("does not answer", await self.refused(credentials, ErrorKind.TRANSIENT))
        self.identity.start()

    async def test_a_role_that_trusts_others_says_so_until_it_trusts_this_one(self) -> None:
        credentials = self.credentials()
        answer = (
            "<ErrorResponse><Error><Code>AccessDenied</Code><Message>Not authorized to perform "
            "sts:AssumeRoleWithWebIdentity</Message></Error></ErrorResponse>"
        )
        with self.identity.refusing(403, answer.encode()):
            words = await self.refused(credentials, ErrorKind.CREDENTIALS)
        self.assertIn("Not authorized to perform sts:AssumeRoleWithWebIdentity", words)
        self.assertTrue((await self.now(credentials)).token)

    async def test_a_missing_token_file_is_named(self) -> None:
        self.token.unlink()
        credentials = self.credentials()
        self.assertIn(str(self.token), await self.refused(credentials, ErrorKind.CREDENTIALS))
        self.token.write_text("header.payload.signature")
        self.assertTrue((await self.now(credentials)).token)


class InstanceRoleTests(CredentialsCase):
    """The role of the instance that is the node, from version 2 of its metadata service."""

    async def setUp(self) -> None:
        await super().setUp()
        del os.environ["AWS_EC2_METADATA_DISABLED"]
        self.environment(AWS_EC2_METADATA_SERVICE_ENDPOINT=self.identity.url)
        # botocore keeps using keys that expire soon, for a quarter of an hour and a random few minutes.
        soon = mock.patch("botocore.utils.random.randint", return_value=-120)
        soon.start()
        self.addCleanup(soon.stop)

    async def test_the_roles_keys_are_found(self) -> None:
        self.identity.add_role("ASIAONE")
        self.assertEqual(await self.now(self.credentials()), Keys("ASIAONE", "hush", "token"))

    async def test_on_an_instance_a_silent_metadata_service_passes(self) -> None:
        self.vendor.write_text("Amazon EC2\n")
        self.identity.add_role("ASIAONE")
        credentials = self.credentials()
        with self.identity.refusing(503):
            words = await self.refused(credentials, ErrorKind.TRANSIENT)
        self.assertIn("give the instance a role", words)
        self.assertGreaterEqual(self.identity.asked.count("/latest/meta-data/iam/security-credentials/"), 3)
        self.assertEqual((await self.now(credentials)).access_key, "ASIAONE")

    async def test_elsewhere_there_are_none(self) -> None:
        self.vendor.write_text("QEMU\n")
        with self.identity.refusing(404):
            await self.refused(self.credentials(), ErrorKind.CREDENTIALS)

    async def test_they_are_renewed_while_the_old_ones_serve(self) -> None:
        self.identity.add_role("ASIAONE", 14 * 60)  # botocore renews keys in their last quarter of an hour
        credentials = self.credentials()
        self.assertEqual((await self.now(credentials)).access_key, "ASIAONE")
        self.identity.add_role("ASIATWO")
        asked = len(self.identity.asked)
        # The reactor's thread, which would have to answer first, must not wait for that.
        self.assertEqual(credentials._thd_now().access_key, "ASIAONE")
        until_when = reactor.seconds() + 30.0
        while (await self.now(credentials)).access_key != "ASIATWO":
            self.assertLess(reactor.seconds(), until_when, "the new keys are not there")
            await deferLater(reactor, 0.05)
        self.assertGreater(len(self.identity.asked), asked)

    async def test_a_renewal_that_fails_leaves_the_old_ones_until_their_end(self) -> None:
        self.identity.add_role("ASIAONE", 14 * 60)
        credentials = self.credentials()
        keys = await self.now(credentials)
        with self.identity.refusing(500):
            asked = len(self.identity.asked)
            self.assertEqual(await self.now(credentials), keys)
            await until_true(lambda: len(self.identity.asked) > asked, "it is asked for others")
            self.assertEqual(await self.now(credentials), keys)


class ContainerTests(CredentialsCase):
    """The role of the container that runs the daemon, from ECS or EKS Pod Identity."""

    async def test_failing_first(self) -> None:
        self.environment(
            AWS_CONTAINER_CREDENTIALS_FULL_URI=f"{self.identity.url}/container",
            AWS_CONTAINER_AUTHORIZATION_TOKEN="pod-token",
        )
        credentials = self.credentials()
        with self.identity.refusing(500, b"{}"), mock.patch("time.sleep"):  # botocore sleeps between attempts
            await self.refused(credentials, ErrorKind.TRANSIENT)
        self.identity.container = {
            "AccessKeyId": "ASIAPOD",
            "SecretAccessKey": "hush",
            "Token": "token",
            "Expiration": until(HOUR),
        }
        self.assertEqual(await self.now(credentials), Keys("ASIAPOD", "hush", "token"))


class ProfileTests(CredentialsCase):
    """AWS' files."""

    async def test_a_profile_is_taken_once_it_is_there(self) -> None:
        credentials = self.credentials("pods")
        words = await self.refused(credentials, ErrorKind.CREDENTIALS)
        self.assertIn("providers.aws.profile", words)
        (self.directory / "credentials").write_text(
            "[pods]\naws_access_key_id = AKIAONE\naws_secret_access_key = hush\n"
        )
        self.assertEqual(await self.now(credentials), Keys("AKIAONE", "hush"))

    async def test_keys_that_were_replaced_are_found(self) -> None:
        file = self.directory / "credentials"
        file.write_text("[default]\naws_access_key_id = AKIAONE\naws_secret_access_key = hush\n")
        credentials = self.credentials()
        self.assertEqual((await self.now(credentials)).access_key, "AKIAONE")
        file.write_text(file.read_text().replace("AKIAONE", "AKIATWO"))
        with mock.patch("infranetes.providers.cloud.aws.credentials._LOOK_AGAIN", -1.0):
            while (await self.now(credentials)).access_key != "AKIATWO":
                await deferToThread(lambda: None)

    async def test_what_is_wrong_with_files_is_said(self) -> None:
        for lines, words in (
            (["[default", "x = 1"], "correct AWS' files"),
            (["[default]", "aws_access_key_id = AKIAONE"], "Partial credentials"),
            (["[default]", f"role_arn = {ROLE}", "source_profile = nobody"], "nobody"),
            (
                [
                    "[default]",
                    f"role_arn = {ROLE}",
                    "source_profile = me",
                    "mfa_serial = arn:aws:iam::1:mfa/me",
                ],
                "MFA",
            ),
        ):
            self.config(*lines)
            self.assertIn(words, await self.refused(self.credentials(), ErrorKind.CREDENTIALS))

    async def test_a_role_by_another_profile(self) -> None:
        self.config(
            "[default]",
            f"role_arn = {ROLE}",
            "source_profile = user",
            "[profile user]",
            "aws_access_key_id = AKIAUSER",
            "aws_secret_access_key = hush",
        )
        credentials = self.credentials()
        with self.identity.refusing(500):
            await self.refused(credentials, ErrorKind.TRANSIENT)
        self.assertTrue((await self.now(credentials)).access_key.startswith("ASIA"))

    async def test_a_process_that_fails_is_run_again(self) -> None:
        script = self.directory / "give"
        self.config("[default]", f"credential_process = {script}")
        given = {"Version": 1, "AccessKeyId": "ASIAOWN", "SecretAccessKey": "hush", "SessionToken": "token"}
        given["Expiration"] = until(HOUR)
        credentials = self.credentials()
        for content, kind in (
            ("echo later >&2; exit 1", ErrorKind.TRANSIENT),
            ("echo hush", ErrorKind.CREDENTIALS),
        ):
            script.write_text(f"#!/bin/sh\n{content}\n")
            script.chmod(stat.S_IRWXU)
            await self.refused(credentials, kind)
        script.write_text(f"#!/bin/sh\necho '{json.dumps(given)}'\n")
        self.assertEqual(await self.now(credentials), Keys("ASIAOWN", "hush", "token"))


class SsoTests(CredentialsCase):
    """A user's sign-in, which `aws sso login` has left in its cache."""

    def sign_in(self, token: str, seconds: float) -> None:
        """Do what `aws sso login` does."""
        import hashlib

        from botocore.credentials import SSOProvider

        cache = self.directory / "sso"
        cache.mkdir(exist_ok=True)
        # botocore's is below the home directory that this process had when botocore was imported.
        self.patch(SSOProvider, "_SSO_TOKEN_CACHE_DIR", str(cache))
        name = hashlib.sha1(b"https://example.awsapps.com/start").hexdigest()  # noqa: S324  botocore's
        content: dict[str, Any] = {"accessToken": token, "expiresAt": until(seconds), "region": REGION}
        (cache / f"{name}.json").write_text(json.dumps(content))

    async def test_who_has_signed_in_again_needs_no_new_daemon(self) -> None:
        self.config(
            "[profile people]",
            "sso_start_url = https://example.awsapps.com/start",
            f"sso_region = {REGION}",
            "sso_account_id = 123456789012",
            "sso_role_name = node",
        )
        credentials = self.credentials("people")
        self.sign_in("old", -60)
        self.assertIn("aws sso login", await self.refused(credentials, ErrorKind.CREDENTIALS))
        self.sign_in("refused", HOUR)
        self.assertIn("aws sso login", await self.refused(credentials, ErrorKind.CREDENTIALS))
        self.sign_in("new", HOUR)
        self.identity.signed_in.add("new")
        with self.identity.refusing(503):
            await self.refused(credentials, ErrorKind.TRANSIENT)
        self.assertEqual(await self.now(credentials), Keys("ASIASSO", "hush", "token"))
