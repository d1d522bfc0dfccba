# SPDX-License-Identifier: Apache-2.0
"""Requests for tokens are the same as those of Google's own library."""

from __future__ import annotations

import base64
import json
import os
from typing import Any
from urllib.parse import unquote

from twisted.internet.threads import deferToThread

from infranetes.providers.cloud.gcp.credentials import SCOPE
from tests.harness.needs import tool
from tests.infranetes.providers.cloud.gcp.credentials_case import CredentialsCase
from tests.support.clouds import google_auth
from tests.support.clouds.google_identity import ACCOUNT, IAM, PLATFORM, POOL, SIGN_IN

NEEDS = (tool("wheels"),)

TARGET = "x-goog-cloud-target-resource"


class ComparedTests(CredentialsCase):
    async def both(self, content: Any) -> tuple[list[Any], list[Any]]:
        """Return what we have sent and what Google's library has sent. Both got tokens of the same holder."""
        ours = await self.now(self.credentials(content))
        sent, paths = list(self.identity.forms), list(self.identity.asked)
        self.identity.forms.clear()
        self.identity.asked.clear()
        token = await deferToThread(
            google_auth._thd_token, content, SCOPE, self.identity.url, self.directory / "google-auth"
        )
        self.assertEqual(self.identity.tokens[token], ours)
        self.assertEqual(self.identity.asked, paths)
        return sent, self.identity.forms

    async def test_by_a_key(self) -> None:
        (ours,), (theirs,) = await self.both(self.identity.key())
        claims = []
        for form in (ours, theirs):
            found = form.pop("assertion").split(".")[1]
            claims.append(json.loads(base64.urlsafe_b64decode(found + "==")))
            claims[-1]["exp"] -= claims[-1].pop("iat")
        self.assertEqual(*claims)
        self.assertEqual(ours, theirs)

    async def test_by_a_sign_in(self) -> None:
        self.identity.sign_ins.add(SIGN_IN)
        (ours,), (theirs,) = await self.both(self.identity.sign_in())
        self.assertEqual(theirs.pop("scope"), SCOPE)  # must be that of the sign-in
        self.assertEqual(ours, theirs)

    async def test_by_another_issuers_token_and_impersonation(self) -> None:
        file = self.directory / "token"
        file.write_text("header.payload.signature")
        self.identity.subjects[file.read_text()] = "node-1"
        self.identity.impersonators.add((f"{POOL}node-1", ACCOUNT))
        ours, theirs = await self.both(self.identity.external({"file": str(file)}, ACCOUNT))
        # IAM accepts both; its description has only the first.
        self.assertEqual((ours[0].pop("scope"), theirs[0].pop("scope")), (PLATFORM, IAM))
        self.assertIsNone(theirs[1].pop("delegates"))
        self.assertEqual(ours, theirs)

    async def test_by_a_role_at_aws(self) -> None:
        self.identity.aws_keys["ASIAONE"] = "hush"
        os.environ.update(
            AWS_ACCESS_KEY_ID="ASIAONE",
            AWS_SECRET_ACCESS_KEY="hush",
            AWS_SESSION_TOKEN="token",
            AWS_REGION="eu-west-1",
        )
        (ours,), (theirs,) = await self.both(self.identity.external(self.identity.aws_source()))
        requests, signed = [], []
        for form in (ours, theirs):
            request = json.loads(unquote(form.pop("subject_token")))
            headers = {each["key"]: each["value"] for each in request.pop("headers")}
            fields = headers.pop("Authorization").split(", ")
            signed.append(set(fields[1].removeprefix("SignedHeaders=").split(";")))
            requests.append((request, {**headers, "x-amz-date": len(headers["x-amz-date"])}))
        self.assertEqual(*requests)
        self.assertEqual(signed[0], signed[1] | {TARGET})
        self.assertEqual(ours, theirs)
