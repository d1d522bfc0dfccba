# SPDX-License-Identifier: Apache-2.0
"""What looks like a secret in any text, and what does not."""

from __future__ import annotations

import json
import time

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.redaction import HIDDEN, blotted, mapped, redacted

KEY = "-----BEGIN EC PRIVATE KEY-----\nPlantedAAAA\nPlantedBBBB\n-----END EC PRIVATE KEY-----"
CUT = KEY[35:]
SECRETS = (
    f"x {KEY} y",
    f"cut off: {KEY[:45]}",
    CUT,
    json.dumps(KEY),
    json.dumps(json.dumps(KEY)),
    KEY.replace("EC PRIVATE KEY", "PGP PRIVATE KEY BLOCK"),
    "https://me:Planted@registry/v2",
    "https://me:Pl@nted@registry/v2",
    "https://me:Plan/ted@registry/v2",
    "https://Planted0123@github.com/x.git",
    "Authorization: Basic OlBsYW50ZWQ=",
    "authorization: basic Planted=",
    "Authorization: Planted",
    '{"Authorization": ["Bearer Planted.Planted"]}',
    "Proxy-Authorization=Token Planted",
    "bearer Planted0123",
    "AWS: Authorization: AWS4-HMAC-SHA256 Credential=x, Signature=Planted",
    "https://x.blob.core.windows.net/c?sv=2022&sig=Planted%3D&se=2026",
    r'{"url": "https://x/c?sv=2022\u0026sig=Planted"}',
    "https://s3.amazonaws.com/b/o?X-Amz-Credential=Planted&X-Amz-Signature=Planted",
    "https://x/?access_token=Planted",
    "https://maps.example/?key=Planted",
    "DefaultEndpointsProtocol=https;AccountName=a;AccountKey=Planted==;EndpointSuffix=x",
    "AWS_SECRET_ACCESS_KEY=Planted",
    "password='Planted with spaces Planted'",
    r'{"password": "Plan\"ted, Planted"}',
    r'"{\"clientSecret\": \"Planted Planted\"}"',
    "users:\n- name: me\n  user:\n    token: Planted\n",
    "    client-key-data: Planted==",
    "X-Auth-Token: Planted",
    "kubeadm join 10.0.0.1 --token Planted.0123 --discovery-token-ca-cert-hash sha256:0",
    "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJQbGFudGVk.Planted",
    "ghp_Planted01234567890123456789",
)
HARMLESS = (
    "https://registry:5000/v2",
    "https://registry.example/a:b@sha256:0123 took 0.1 s",
    "docker://busybox:1.36@sha256:0123",
    "http://registry:5000/name@v1",
    "a bearer of news",
    "bearer tokens are needed",
    "basic authentication failed",
    'WWW-Authenticate: Bearer realm="https://auth.example/token",service="registry"',
    "user@host:path",
    "[::1]:2475",
    "the token: it has expired",
    "password_file=/etc/infranetes/password",
    "--token-file /etc/infranetes/token",
    "providers.aws.secret_key: access_key and secret_key go together",
)
# Repeated, these are the worst texts for patterns such as ours.
HARD = (
    *("-", "=", ":", "a", " ", "\n", "://", "://a:x", "://a@", "- ", "\t--", "eyJaaaaaaaaaaaa."),
    *('password="', 'password="\\', "password='", "password=", "password: ", "--password ", "--password"),
    *("-----BEGIN ", "-----BEGIN PRIVATE KEY-----", "-----END PRIVATE KEY-----", "QUJD", "Bearer "),
    *("authorization: ", "authorization", "ghp_", "a.token"),
)


class ShapeTests(SynchronousTestCase):
    def test_secrets_are_hidden_in_all_their_shapes(self) -> None:
        for text in SECRETS:
            shown = redacted(text)
            self.assertIn(HIDDEN, shown)
            for part in ("Plan", "ted", "OlBs"):
                self.assertNotIn(part, shown, text)

    def test_the_rest_of_the_text_stays(self) -> None:
        self.assertEqual(
            redacted("GET https://me:pw@proxy:3128/a failed"), f"GET https://{HIDDEN}@proxy:3128/a failed"
        )
        self.assertEqual(redacted("/c?sv=1&sig=abc&se=2"), f"/c?sv=1&sig={HIDDEN}&se=2")
        shown = redacted('{"password": "a", "name": "b"}')
        self.assertEqual(json.loads(shown), {"password": HIDDEN, "name": "b"})

    def test_an_empty_secret_takes_nothing_with_it(self) -> None:
        text = 'image docker.io/x, password="" and token: "" in pod web'
        self.assertEqual(redacted(text), text)

    def test_what_is_no_secret_stays(self) -> None:
        for text in HARMLESS:
            self.assertEqual(redacted(text), text)

    @given(st.lists(st.sampled_from([each for each in (*SECRETS, *HARMLESS) if each != CUT])).map("\n".join))
    def test_secrets_are_hidden_among_others(self, text: str) -> None:
        shown = redacted(text)
        for part in ("Plan", "nted", "OlBs"):
            self.assertNotIn(part, shown)

    def test_letters_that_become_two_in_lower_case_shift_nothing(self) -> None:
        self.assertEqual(redacted("İİİ password=hunter2"), f"İİİ password={HIDDEN}")

    def test_no_text_takes_longer_than_its_length_explains(self) -> None:
        for hard in HARD:
            began = time.process_time()
            redacted(hard * (10_000 // len(hard)))
            took = time.process_time() - began
            self.assertLess(took, 0.5, hard)  # if it grew with the square, it would be seconds


class PartTests(SynchronousTestCase):
    def test_parts_that_overlap_are_hidden_as_one(self) -> None:
        self.assertEqual(blotted("0123456789", [(6, 8), (1, 4), (2, 5)]), f"0{HIDDEN}5{HIDDEN}89")
        self.assertEqual(blotted("0123", []), "0123")
        self.assertEqual(blotted("0123", [(0, 4)]), HIDDEN)

    @given(st.text("0123456789"), st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12))))
    def test_outside_of_the_parts_every_character_stays(
        self, text: str, parts: list[tuple[int, int]]
    ) -> None:
        hidden = {at for start, stop in parts for at in range(start, stop)}
        kept = "".join(each for at, each in enumerate(text) if at not in hidden)
        self.assertEqual(blotted(text, parts).replace(HIDDEN, ""), kept)

    def test_a_document_is_changed_in_every_text(self) -> None:
        document = {"a": ["x", 1, None, ("x",)], "x": {"b": True}}
        self.assertEqual(mapped(document, str.upper), {"A": ["X", 1, None, ["X"]], "X": {"B": True}})
