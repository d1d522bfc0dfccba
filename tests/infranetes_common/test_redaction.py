# SPDX-License-Identifier: Apache-2.0
"""What looks like a secret in any text, and what does not."""

from __future__ import annotations

import ast
import json
import time
from collections.abc import Iterator
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.redaction import (
    _WORDS,
    BEFORE,
    HIDDEN,
    NEAR,
    blotted,
    end_of,
    redacted,
    redacted_beginning,
    redacted_end,
)

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
    "Authorization: Planted0123, Accept: */*",
    "Authorization: Bearer a=b, Planted",
    'Authorization: Digest username="Planted", response="Planted"',
    '{"Authorization": "abc Planted"}',
    """curl -H 'Authorization: abc Planted'""",
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
    'password = "Planted Planted"',
    "a password = 'Planted Planted' there",
    "[default]\n  aws.token = Planted Planted\nregion = x",
    'curl -H "X-Auth-Token: gPlanted" https://x',
    "headers: X-Auth-Token: gPlanted, Accept: y",
    "{b'X-Subject-Token': [b'gPlanted']}",
    r'"{\"X-Vault-Token\": \"Planted\"}"',
    "x-amz-security-token:Planted==",
    "vmware-api-session-id: Planted",
    'Cookie: vmware_soap_session="Planted"; b=Planted',
    r'{"Cookie": "vmware_soap_session=\"Planted\"; Path=/"}',
    "set-cookie: a=Planted; Secure",
    "curl -b x -H 'Cookie: a=Planted; b=Planted' https://x",
    "password=b'Planted Planted'",
    "{'password': b'Planted'}",
    "&AuthConfig{Username:u,Password:Planted,IdentityToken:Planted}",
    "&{Username:u Password:Planted Auth:Planted RegistryToken:}",
    "map[password:Planted user:bob]",
    "map[auth:map[user:bob token:Planted]]",
    "login failed: user: bob password: Planted2xx",
    "login failed: user: bob, client_secret: plantedPlanted, tenant: x",
    "it has got the token: Planted0123456789ABCDEF and keeps it",
    'login failed: password: "Planted"',
    'login failed: user: "bob" password: "Planted Planted"',
    'login failed with token: "Planted"',
    'login failed: token: "Planted Planted"',
    "login failed with clientSecret: 'Planted Planted'",
    '{user: "bob", auth: "Planted Planted"}',
    'annotations:\n  example.com/api-token: "Planted"',
    '{"example.com/api-token": "Planted Planted"}',
    "MYSQL_PWD=/Planted",
    "mysql --pwd=/Planted",
)
# Secrets that are numbers.
NUMBERS = (
    '{"password": 12345678}',
    '{"password":12345678, "user": "bob"}',
    json.dumps('{"password": 12345678}'),
    "{'token': 12345678}",
    "password: 12345678\nuser: bob",
    "&{User:bob Password:12345678}",
    "user: bob password: 12345678 host: x",
    '{"apiKey": 1234.5678}',
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
    "pull access denied, repository does not exist or may require authorization: "
    "server message: insufficient_scope: authorization failed",
    "Basic functionality missing",
    "negotiate features with QEMU",
    "the flag --token is missing",
    "give --password FILE",
    'unexpected token: "}"',
    'password=None, token=null, secret="", auth=true',
    "connect(user='x', password=None)",
    "automountServiceAccountToken: false",
    "password = None",
    'auth: "invalid_grant"',
    'if token == "" and password != 0',
    "the cookie monster: a puppet",
    "may require authorization: insufficient_scope: no",
    "may require authorization: UNAUTHORIZED: authentication required",
    "password_file=/etc/infranetes/password",
    "--token-file /etc/infranetes/token",
    "providers.aws.secret_key: access_key and secret_key go together",
    'can\'t open /etc/passwd: "No such file or directory"',
    "can't open /etc/passwd: 'EOF'",
    "hostPath /etc/secret: 'No such file'",
    "/run/secrets/token: is missing",
    'container auth: "exec /x: no such file"',
    'error: container "web" auth: "exec /x: no such file"',
    "error: container web (auth) token: 'exec /x: no such file'",
    'image reg/oauth: "manifest unknown"',
    "image docker.io/library/oauth:latest, and reg/auth:v1.2",
    "image auth:1.36-glibc, oauth:latest and oauth:v2 are there",
    'reg/oauth: "manifest unknown"',
    'no token: "invalid client"',
    "failed to fetch the token: x509: certificate signed by unknown authority",
    "failed to fetch the token: ip-10-0-0-1.ec2.internal does not answer",
    "wrong password: x509: certificate has expired",
    "dial tcp auth:8080: connection refused; auth:443, auth:12: too",
    "crate::auth::Error and token::new",
    "PWD=/var/lib/x",
    'OLDPWD=/var/lib/x HOME=/root PWD=/ PWD="/a b"',
    "auth: ok",
    "token: expired",
    "password: required",
    '{"token": 12, "password": true}',
    "password: it has 12 characters",
)
# Repeated or mixed, these are the worst texts for patterns such as ours.
HARD = (
    *("-eyJ", "eyJaaaaaaaaaaaa-", "://a:b", "authorization:", 'token="', "token=", "token='", r"token=\""),
    *(r"token\": \"", "\ntoken = ", "?key=", "sig=", "\\", '"', "'", "İ", "-----END ", "\\nQUJD", "\nQUJD"),
    *(
        "X-Auth-Token: ",
        "x-auth-token",
        "vmware-api-session-id",
        "cookie",
        "cookie:\\",
        "cookie:a",
        "cookie: a=",
        "cookie: a=b; ",
        "token = ",
        "Proc-Type: 4\n",
    ),
    *("-", "=", ":", "a", " ", "\n", "://", "://a:x", "://a@", "- ", "\t--", "eyJaaaaaaaaaaaa."),
    *('password="', 'password="\\', "password='", "password=", "password: ", "--password ", "--password"),
    *("-----BEGIN ", "-----BEGIN PRIVATE KEY-----", "-----END PRIVATE KEY-----", "QUJD", "Bearer "),
    *("authorization: ", "authorization", "ghp_", "a.token", "/token: '", 'a token: "a ', 'a token: "'),
    *("token:", "token:a", "/token:a", "a token: a", "a password: a", "a password: a1", "token: 1", "pwd=/"),
    *("a password: ", "'token': 1", "a/b.c", "\n- a/token: 'a "),
)


ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("infranetes", "infranetes_common", "infranetes_simulation", "txgrpc", "vmserver")


def written(module: ast.Module) -> Iterator[str]:
    """Yield the texts of a module, but for docstrings. F-strings have values such as they may have."""
    parts: set[int] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Expr):
            parts.add(id(node.value))
        elif isinstance(node, ast.JoinedStr):
            parts |= {id(each) for each in node.values}
            for value in ("x", "web-0", "'no such file'", "4711"):
                yield "".join(
                    str(each.value) if isinstance(each, ast.Constant) else value for each in node.values
                )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield node.value


def least_time(text: str) -> float:
    """The seconds of the CPU that redacting takes: the least of several, as others use the CPU's caches."""
    least = 1.0
    for _ in range(5):
        began = time.process_time()
        redacted(text)
        least = min(least, time.process_time() - began)
        if least < 0.02:
            break
    return least


class ShapeTests(SynchronousTestCase):
    def test_secrets_are_hidden_in_all_their_shapes(self) -> None:
        for text in SECRETS:
            shown = redacted(text)
            self.assertIn(HIDDEN, shown)
            for part in ("Plan", "ted", "OlBs"):
                self.assertNotIn(part, shown, text)

    def test_a_key_without_an_end_is_hidden_as_far_as_it_goes(self) -> None:
        cut = KEY.partition("\n-----END")[0]
        header = "Proc-Type: 4,ENCRYPTED\nDEK-Info: AES-256-CBC,0F\n\n"
        for text in (
            cut,
            json.dumps(cut)[1:-1],
            json.dumps(json.dumps(cut))[3:-3],
            cut.replace("\n", "\n   "),
        ):
            self.assertEqual(redacted(f"{text}\n(end)\nand then"), f"{HIDDEN}\n(end)\nand then")
            self.assertEqual(redacted(f"'{text}' is wrong"), f"'{HIDDEN}' is wrong")
            self.assertEqual(redacted(f"a {text[:-3]}"), f"a {HIDDEN}")
        self.assertEqual(redacted(cut.replace("Planted", header + "Planted", 1) + "\n:"), f"{HIDDEN}\n:")
        self.assertEqual(redacted(f"{cut[:30]} {'QUJD' * 16} {'QUJD' * 16} QUJ"), HIDDEN)

    def test_the_mention_of_a_key_hides_nothing_else(self) -> None:
        for rest in (" is missing in the file\nfirst\nsecond", "\n[1]: it began\n" * 9):
            self.assertEqual(redacted(f"-----BEGIN PRIVATE KEY-----{rest}"), f"{HIDDEN}{rest}")
        text = f"-----BEGIN PRIVATE KEY----- is missing\n{KEY}"
        self.assertEqual(redacted(text), f"{HIDDEN} is missing\n{HIDDEN}")

    def test_the_rest_of_the_text_stays(self) -> None:
        self.assertEqual(
            redacted("GET https://me:pw@proxy:3128/a failed"), f"GET https://{HIDDEN}@proxy:3128/a failed"
        )
        self.assertEqual(redacted("/c?sv=1&sig=abc&se=2"), f"/c?sv=1&sig={HIDDEN}&se=2")
        shown = redacted('{"password": "a", "name": "b"}')
        self.assertEqual(json.loads(shown), {"password": HIDDEN, "name": "b"})

    def test_numbers_may_be_secrets(self) -> None:
        for text in NUMBERS:
            self.assertNotRegex(redacted(text), "[0-9]", text)

    def test_a_token_of_small_letters_alone_is_hidden_if_it_is_longer_than_words(self) -> None:
        self.assertEqual(redacted(f"bearer {'planted' * 3}"), f"bearer {HIDDEN}")

    def test_an_empty_secret_takes_nothing_with_it(self) -> None:
        text = 'image docker.io/x, password="" and token: "" in pod web'
        self.assertEqual(redacted(text), text)

    def test_what_is_no_secret_stays(self) -> None:
        for text in HARMLESS:
            self.assertEqual(redacted(text), text)

    def test_what_we_write_ourselves_stays(self) -> None:
        for package in PACKAGES:
            for path in sorted((ROOT / package).rglob("*.py")):
                if path.name == "redaction.py":  # patterns
                    continue
                for text in written(ast.parse(path.read_text())):
                    self.assertEqual(redacted(text), text, path)

    @given(st.lists(st.sampled_from([each for each in (*SECRETS, *HARMLESS) if each != CUT])).map("\n".join))
    def test_secrets_are_hidden_among_others(self, text: str) -> None:
        shown = redacted(text)
        for part in ("Plan", "nted", "OlBs"):
            self.assertNotIn(part, shown)

    def test_letters_that_become_two_in_lower_case_shift_nothing(self) -> None:
        self.assertEqual(redacted("İİİ password=hunter2"), f"İİİ password={HIDDEN}")

    def test_no_text_takes_longer_than_its_length_explains(self) -> None:
        mixed = [f"{one}{another}" for one, another in zip(HARD, HARD[7:] + HARD[:7], strict=True)]
        words = [f"{word}{sign}" for word in _WORDS for sign in ("", "=", ": ", '="')]
        for hard in (*HARD, *mixed, *words):
            self.assertLess(least_time(hard * (16 * 1024 // len(hard))), 0.04, hard)

    def test_texts_that_are_hard_in_two_ways_take_no_longer(self) -> None:
        for one, another in zip(HARD, HARD[5:] + HARD[:5], strict=True):
            text = one * (8 * 1024 // len(one)) + another * (8 * 1024 // len(another))
            self.assertLess(least_time(text), 0.04, (one, another))


class CutTests(SynchronousTestCase):
    """Of long texts a part is kept."""

    def test_a_secret_at_the_cut_is_hidden_like_others(self) -> None:
        for secret in SECRETS:
            if secret == CUT:
                continue
            text = f"{'word ' * NEAR}\n{secret}\n{' word' * NEAR}"
            at = text.index("Pl" if "Pl" in secret else "OlBs")
            for cut in range(at - 30, at + 30):
                for shown in (redacted_beginning(text, cut), redacted_end(text, len(text) - cut)):
                    for part in ("Pla", "nte", "OlBs"):
                        self.assertNotIn(part, shown, (secret, cut - at))

    def test_the_beginning_ends_with_a_word(self) -> None:
        for space in " \t\n\r\u2028":
            text = f"one{space}two{space}" * NEAR
            for cut in range(2 * NEAR, 2 * NEAR + 9):
                shown = redacted_beginning(text, cut)
                self.assertTrue(cut - 4 < len(shown) <= cut)
                self.assertIn(shown.split()[-1], ("one", "two"))

    def test_the_end_begins_with_a_line_or_at_least_a_word(self) -> None:
        self.assertEqual(redacted_end("one two\n" * NEAR, 2 * NEAR + 3), "one two\n" * (NEAR // 4))
        self.assertEqual(redacted_end("two " * NEAR, 2 * NEAR + 3), "two " * (NEAR // 2))

    def test_hardly_more_is_dropped_than_asked_for(self) -> None:
        for text in (
            "x" * 9 * NEAR,
            "a " + "x" * 9 * NEAR,
            "x" * 9 * NEAR + "\n",
            "x" * 5 * NEAR + "\nx" * NEAR,
        ):
            for shown in (redacted_beginning(text, 4 * NEAR), redacted_end(text, 4 * NEAR)):
                self.assertGreaterEqual(len(shown), 3 * NEAR)
                self.assertLessEqual(len(shown), 4 * NEAR)

    def test_of_little_most_is_kept_too(self) -> None:
        text = f"a {'x' * 9 * NEAR} b"
        self.assertEqual(redacted_beginning(text, 200), text[:200])
        self.assertEqual(redacted_end(text, 200), text[-200:])

    def test_a_long_secret_at_the_cut_is_hidden(self) -> None:
        text = f'{"word " * NEAR}"client-key-data": "{"LS0t" * 800}" {"word " * NEAR}'
        at = text.index("LS0t") + 1500
        self.assertNotIn("LS0t", redacted_beginning(text, at))
        self.assertNotIn("LS0t", redacted_end(text, len(text) - at))

    def test_a_secret_that_begins_long_before_the_end_is_hidden(self) -> None:
        for long in (700, BEFORE // 8):
            text = f'{"word " * NEAR}password: "{"Planted " * long}" end'
            self.assertEqual(redacted_end(text, 300), f'{HIDDEN}" end')

    def test_short_texts_are_whole(self) -> None:
        self.assertEqual(redacted_beginning("a b\n", 4), "a b\n")
        self.assertEqual(redacted_end("a b\n", 4), "a b\n")
        self.assertEqual(end_of("a b\n", 4), "a b\n")

    def test_an_end_has_whole_lines_or_what_comes_next(self) -> None:
        self.assertEqual(end_of("one\ntwo a\nthree\n", 10), "three\n")
        self.assertEqual(end_of("one\rtwo\rthree\n", 10), "three\n")
        self.assertEqual(end_of("one two three", 8), "three")
        self.assertEqual(end_of("0123456789", 4), "6789")


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
