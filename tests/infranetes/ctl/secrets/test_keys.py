# SPDX-License-Identifier: Apache-2.0
"""Which values of a document are secrets, and how they are hidden in it."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from infranetes.ctl.secrets.keys import leaves, mapped, may_be_secret
from infranetes_common.redaction import HIDDEN

NAMED = (("name", "value"), ("Name", "Value"), ("key", "value"), ("Key", "Value"))


class MappedTests(SynchronousTestCase):
    """Documents whose secrets are hidden."""

    def test_a_document_is_changed_in_every_text(self) -> None:
        document = {"a": ["x", 1, None, ("x",)], "x": {"b": True}}
        self.assertEqual(mapped(document, str.upper), {"A": ["X", 1, None, ["X"]], "X": {"B": True}})

    def test_a_key_gives_its_value_away(self) -> None:
        for key in ("password", "example.com/api-token", "clientSecret", "X-Auth-Token", "Cookie", "pin"):
            self.assertEqual(mapped({"a": {key: "abcd", "b": "c"}}, str), {"a": {key: HIDDEN, "b": "c"}})
            self.assertEqual(mapped({key: ["abcd", 12345678, 1.5]}, str), {key: [HIDDEN] * 3})
            for name, value in NAMED:
                named = {name: key, value: "abcd", "b": "c"}
                self.assertEqual(mapped([named], str), [{**named, value: HIDDEN}])

    def test_below_a_secret_key_all_is_secret_but_what_is_said_of_it(self) -> None:
        table = {"a": "hunter2", "b": [{"c": 12345678}], "name": "web", "user": "bob", "d": None}
        shown = {**table, "a": HIDDEN, "b": [{"c": HIDDEN}]}
        for key in ("secret", "passwords", "client_credentials", "secretData"):
            self.assertEqual(mapped({key: table}, str), {key: shown})
        self.assertEqual(
            mapped({"secret-pods": {"memory": "1GiB"}}, str), {"secret-pods": {"memory": "1GiB"}}
        )

    def test_an_argument_after_a_flag_is_the_flags(self) -> None:
        for given, shown in (
            (["--token", "xyzzy", "xyzzy"], ["--token", HIDDEN, "xyzzy"]),
            (["run", "--pin=1234", "--user=me"], ["run", f"--pin={HIDDEN}", "--user=me"]),
            (["--token-file", "/x", "-", "a token"], ["--token-file", "/x", "-", "a token"]),
            (["- a token", "and more"], ["- a token", "and more"]),
        ):
            self.assertEqual(mapped({"env": given}, str), {"env": shown})
            self.assertEqual(mapped(given, str), shown)

    def test_what_looks_like_a_flag_may_be_a_secret(self) -> None:
        self.assertEqual(mapped({"passwords": ["-xyzzy", "--a=b"]}, str), {"passwords": [HIDDEN, HIDDEN]})
        self.assertEqual([text for _, text in leaves({"passwords": ["-xyzzy", "b"]})], ["-xyzzy", "b"])

    def test_other_values_stay(self) -> None:
        for document in (
            {"token_file": "/x", "secretName": "x", "name": "token", "automountToken": False},
            {"password": "", "token": "null", "secret": {"a": None, "b": True, "c": "disabled"}},
            {"a search for the secrets of /etc/infranetes/token": "it can't be read"},
            {"configuration/00-auth.toml.json": "it is no TOML", "pods/auth/console.txt": "it is gone"},
            {"name": "HOME", "value": "/root"},
            {"key": "HOME", "value": "/root"},
            {"key": "0123456789abcdef", "built_at": 1.5},
            {"PWD": "/var/lib/x", "env": [{"name": "OLDPWD", "value": "/x"}]},
        ):
            self.assertEqual(mapped(document, str), document)


class KeysTests(SynchronousTestCase):
    """Keys alone, and what they lead to."""

    def test_keys_of_secrets_and_others(self) -> None:
        for key in (
            "password",
            "DB_PASS",
            "AWS Secret Access Key",
            "authorization",
            "signature",
            "key",
            "tokens",
        ):
            self.assertTrue(may_be_secret(key), key)
        for key in ("authority", "key_name", "secretName", "key_file", "PWD", "where a node has its secrets"):
            self.assertFalse(may_be_secret(key), key)

    def test_of_a_named_value_the_name_is_the_key(self) -> None:
        for name, value in NAMED:
            found = list(leaves([{name: "PIN", value: 1234}]))
            self.assertIn((("PIN",), "1234"), found)
            self.assertNotIn((("key",), "PIN"), found)
