# SPDX-License-Identifier: Apache-2.0
"""Where Google's tokens come from, and how failures on the way are reported."""

from __future__ import annotations

import io
import os
import time

from twisted.internet.defer import gatherResults
from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThread
from twisted.logger import globalLogPublisher

from infranetes.providers.cloud.calls import renewal
from infranetes.providers.cloud.gcp import credentials as module
from infranetes.providers.cloud.gcp.credentials import SCOPE
from infranetes.providers.cloud.interface import CloudError, ErrorKind
from infranetes_common import logging
from tests.contract.pod_provider_case import reactor
from tests.harness.needs import tool
from tests.infranetes.providers.cloud.gcp.credentials_case import CredentialsCase
from tests.support.clouds.google_identity import (
    ACCOUNT,
    METADATA,
    PERSON,
    PLATFORM,
    POOL,
    SIGN_IN,
    Holder,
    write,
)
from tests.support.waiting import until

NEEDS = (tool("wheels"),)

OTHER = "other@test-project.iam.gserviceaccount.com"


class _Clock:
    """A clock that a test can advance. :ivar later: by how many seconds."""

    later = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.later


class KeyTests(CredentialsCase):
    """A service account's key."""

    async def test_it_gives_a_token_for_the_scope(self) -> None:
        self.assertEqual(await self.now(self.credentials(self.identity.key())), Holder(ACCOUNT, SCOPE))

    async def test_all_threads_share_a_token(self) -> None:
        credentials = self.credentials(self.identity.key())
        await gatherResults([deferToThread(lambda: credentials.access_token) for _ in range(8)])
        self.assertEqual(self.identity.asked, ["/token"])

    async def test_a_token_that_was_refused_is_replaced(self) -> None:
        credentials = self.credentials(self.identity.key())
        first = await deferToThread(lambda: credentials.access_token)
        await deferToThread(credentials._thd_forget, "another")
        self.assertEqual(await deferToThread(lambda: credentials.access_token), first)
        await deferToThread(credentials._thd_forget, first)
        self.assertNotEqual(await deferToThread(lambda: credentials.access_token), first)

    async def test_what_passes_is_not_for_good(self) -> None:
        credentials = self.credentials(self.identity.key())
        for status, body in (
            (500, b"hush"),
            (503, b""),
            (408, b""),
            (429, b""),
            (400, b'{"error": "internal_failure"}'),
            (200, b"<html>hush: sign in to the proxy</html>"),
            (200, b"{}"),
            (200, b'{"access_token": "hush\\n"}'),
        ):
            with self.identity.refusing(status, body):
                await self.refused(credentials, ErrorKind.TRANSIENT)
        self.assertEqual((await self.now(credentials)).name, ACCOUNT)

    async def test_how_long_to_wait_is_told(self) -> None:
        credentials = self.credentials(self.identity.key())
        with self.identity.refusing(429, b"", Retry_After="7"), self.assertRaises(CloudError) as caught:
            await self.now(credentials)
        self.assertEqual(caught.exception.retry_after, 7.0)

    async def test_a_server_that_is_not_there_passes(self) -> None:
        credentials = self.credentials(self.identity.key())
        await self.identity.stop()
        self.assertIn("does not answer", await self.refused(credentials, ErrorKind.TRANSIENT))
        self.identity.start(reactor)

    async def test_a_redirection_is_not_followed(self) -> None:
        elsewhere = f"{self.identity.url}/elsewhere"
        with self.identity.refusing(307, b"", "/token", Location=elsewhere):
            await self.refused(self.credentials(self.identity.key()), ErrorKind.CREDENTIALS)
        self.assertEqual(self.identity.asked, ["/token"])

    async def test_a_long_answer_is_not_read_to_its_end(self) -> None:
        with self.identity.refusing(200, b"x" * 1_000_000):
            words = await self.refused(self.credentials(self.identity.key()), ErrorKind.CREDENTIALS)
        self.assertIn("more than 131072 bytes", words)

    async def test_a_key_that_was_deleted_says_so_until_there_is_another(self) -> None:
        credentials = self.credentials({**self.identity.key(), "client_email": OTHER})
        words = await self.refused(credentials, ErrorKind.CREDENTIALS)
        self.assertIn("invalid_grant: Invalid JWT Signature", words)
        write(self.directory / "key.json", self.identity.key())
        self.assertEqual((await self.now(credentials)).name, ACCOUNT)

    async def test_what_is_no_key_is_not_shown(self) -> None:
        bad = "-----BEGIN PRIVATE KEY-----\nhush\n-----END PRIVATE KEY-----\n"
        credentials = self.credentials({**self.identity.key(), "private_key": bad})
        self.assertIn("no RSA key", await self.refused(credentials, ErrorKind.CREDENTIALS))

    async def test_it_is_reached_by_the_proxy_that_the_environment_names(self) -> None:
        os.environ["http_proxy"] = self.identity.url
        credentials = self.credentials(self.identity.key(), token_endpoint="http://tokens.invalid")
        await self.refused(credentials, ErrorKind.CREDENTIALS)
        self.assertEqual(len(self.identity.asked), 1)


class MetadataTests(CredentialsCase):
    """The service account of the instance that is the node."""

    async def test_its_token_is_taken(self) -> None:
        self.assertEqual(await self.now(self.credentials()), Holder(ACCOUNT, SCOPE))

    async def test_it_is_asked_without_a_proxy(self) -> None:
        os.environ["http_proxy"] = "http://127.0.0.1:9"
        self.assertEqual((await self.now(self.credentials())).name, ACCOUNT)

    async def test_where_it_is_may_be_in_the_environment(self) -> None:
        os.environ["GCE_METADATA_HOST"] = self.identity.url.removeprefix("http://")
        self.assertEqual((await self.now(self.credentials(token_endpoint=""))).name, ACCOUNT)

    async def test_an_instance_without_an_account_says_so_until_it_has_one(self) -> None:
        credentials = self.credentials()
        self.identity.metadata_scope = ""
        self.assertIn("see key_file", await self.refused(credentials, ErrorKind.CREDENTIALS))
        self.identity.metadata_scope = SCOPE
        self.assertEqual((await self.now(credentials)).name, ACCOUNT)

    async def test_a_server_that_does_not_work_passes(self) -> None:
        credentials = self.credentials()
        for status, body in ((503, b""), (200, b"starting")):
            with self.identity.refusing(status, body):
                await self.refused(credentials, ErrorKind.TRANSIENT)
        self.assertEqual((await self.now(credentials)).name, ACCOUNT)

    async def test_another_machine_has_none_and_is_told_where_they_were_looked_for(self) -> None:
        self.product.write_text("Standard PC (Q35 + ICH9, 2009)\n")
        words = await self.refused(self.credentials(token_endpoint=""), ErrorKind.CREDENTIALS)
        for each in ("key_file", "GOOGLE_APPLICATION_CREDENTIALS", str(self.directory / "gcloud")):
            self.assertIn(each, words)


class FoundTests(CredentialsCase):
    """Which of several credentials are used."""

    async def test_they_are_found_in_the_order_of_googles_own_tools(self) -> None:
        self.identity.subjects["header.payload.signature"] = "ours"
        token = self.directory / "token"
        token.write_text("header.payload.signature\n")
        self.identity.sign_ins.add(SIGN_IN)
        self.assertEqual((await self.now(self.credentials())).name, ACCOUNT)
        self.assertEqual(self.identity.asked.pop(), METADATA)
        write(
            self.directory / "gcloud" / "application_default_credentials.json",
            self.identity.sign_in(),
        )
        self.assertEqual((await self.now(self.credentials())).name, PERSON)
        file = write(self.directory / "env.json", self.identity.external({"file": str(token)}))
        os.environ["GOOGLE_APPLICATION_CREDENTIALS"] = str(file)
        self.assertEqual((await self.now(self.credentials())).name, f"{POOL}ours")
        self.assertEqual((await self.now(self.credentials(self.identity.key()))).name, ACCOUNT)
        self.assertNotIn(METADATA, self.identity.asked)

    async def test_a_file_that_is_named_and_missing_is_not_passed_over(self) -> None:
        os.environ["GOOGLE_APPLICATION_CREDENTIALS"] = str(self.directory / "nowhere")
        words = await self.refused(self.credentials(), ErrorKind.CREDENTIALS)
        self.assertIn(f"GOOGLE_APPLICATION_CREDENTIALS {self.directory / 'nowhere'} can't be read", words)
        self.assertEqual(self.identity.asked, [])


class SignInTests(CredentialsCase):
    """A user's credentials, as `gcloud auth application-default login` leaves them."""

    async def test_who_has_signed_in_again_needs_no_new_daemon(self) -> None:
        credentials = self.credentials(self.identity.sign_in("hush-old"))
        words = await self.refused(credentials, ErrorKind.CREDENTIALS)
        self.assertIn("Token (hidden) has been expired or revoked", words)
        self.assertIn("gcloud auth application-default login", words)
        self.identity.sign_ins.add("hush-new")
        write(self.directory / "key.json", self.identity.sign_in("hush-new"))
        with self.identity.refusing(503):
            await self.refused(credentials, ErrorKind.TRANSIENT)
        self.assertEqual(await self.now(credentials), Holder(PERSON, PLATFORM))


class RenewalTests(CredentialsCase):
    """The next token is obtained before the last one expires."""

    async def setUp(self) -> None:
        await super().setUp()
        self.clock = _Clock()
        for each in (module, renewal):
            self.patch(each, "time", self.clock)
        self.identity.seconds = 3600
        self.credentials_ = self.credentials()
        self.first = await deferToThread(lambda: self.credentials_.access_token)

    async def test_it_serves_until_five_minutes_before_its_end(self) -> None:
        self.clock.later = 3600 - 330
        self.assertEqual(self.credentials_.access_token, self.first)
        await deferLater(reactor, 0.05)
        self.assertEqual(self.identity.asked, [METADATA])

    async def test_it_is_renewed_while_it_serves(self) -> None:
        self.clock.later = 3600 - 290
        # The reactor's thread, which would have to answer first, must not wait for that.
        self.assertEqual(self.credentials_.access_token, self.first)
        await until(lambda: len(self.identity.tokens) == 2, "there is another one")
        while await deferToThread(lambda: self.credentials_.access_token) == self.first:
            await deferLater(reactor, 0.02)
        self.assertEqual(len(self.identity.asked), 2)

    async def test_a_renewal_that_fails_leaves_it_until_its_end_and_is_told_without_secrets(self) -> None:
        told = io.StringIO()
        observer = logging.observer("json", "debug", told)
        globalLogPublisher.addObserver(observer)
        self.addCleanup(globalLogPublisher.removeObserver, observer)
        with self.identity.refusing(503, self.first.encode()):
            self.clock.later = 3600 - 290
            self.assertEqual(self.credentials_.access_token, self.first)
            await until(lambda: "can't be renewed" in told.getvalue(), "it is told")
            self.assertEqual(self.credentials_.access_token, self.first)
            self.clock.later = 3600
            await self.refused(self.credentials_, ErrorKind.TRANSIENT)
        self.assertEqual((await self.now(self.credentials_)).name, ACCOUNT)
        self.assertNotIn(self.first, told.getvalue())
        self.assertNotIn(self.first, repr(self.credentials_._lease))
