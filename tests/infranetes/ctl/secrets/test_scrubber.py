# SPDX-License-Identifier: Apache-2.0
"""What is taken out of whatever text."""

from __future__ import annotations

import base64
import html
import json
from urllib.parse import quote, quote_plus

from twisted.trial.unittest import SynchronousTestCase

from infranetes.ctl.secrets.scrubber import Scrubber
from infranetes_common.redaction import HIDDEN

KEY = "-----BEGIN PRIVATE KEY-----\nMIIplanted0123456789\nAAplanted0123456789==\n-----END PRIVATE KEY-----\n"
OTHER = KEY.replace("planted", "another")


class ScrubberTests(SynchronousTestCase):
    def clean(self, text: str, *known: str) -> str:
        return Scrubber(known).clean(text)

    def test_what_is_known_is_taken_out_as_it_is_and_in_base64(self) -> None:
        secret = "correct horse"
        coded = base64.b64encode(secret.encode()).decode()
        cleaned = self.clean(f"a {secret} b {coded} c", secret, "correct horse battery")
        self.assertEqual(cleaned.replace("==", ""), f"a {HIDDEN} b {HIDDEN} c")

    def test_it_is_found_within_something_in_base64(self) -> None:
        for before in ("", "a", "ab", "abc"):
            for after in ("", "z", "zz"):
                coded = base64.b64encode(f"{before}correct horse{after}".encode()).decode()
                self.assertIn(HIDDEN, self.clean(coded, "correct horse"), coded)

    def test_it_is_found_however_it_is_written(self) -> None:
        secret = 'pa"ss\nwörd-<lo&ng>\t\\x'
        for text in (
            secret,
            json.dumps(secret),
            json.dumps(secret, ensure_ascii=False),
            json.dumps(json.dumps(secret)),
            json.dumps({"config": json.dumps({"a": secret})}),
            repr(secret),
            html.escape(secret),
            quote(secret),
            quote(secret, safe="").lower(),
            quote_plus(secret),
            " ".join(secret.split()),
            secret.replace("\n", "\\n").replace("\t", "\\t"),
            json.dumps(secret.replace("\n", "\\n").replace("\t", "\\t")),
        ):
            cleaned = self.clean(f"a {text} b", secret)
            for part in ("pa", "ss", "rd", "ng", "x"):
                self.assertNotIn(part, cleaned, text)

    def test_what_is_known_in_base64_is_found_as_it_is(self) -> None:
        coded = base64.b64encode(KEY.encode()).decode()
        self.assertNotIn("planted", self.clean("a MIIplanted0123456789 b", coded))
        self.assertNotIn("planted", self.clean("sent planted-0123", "Bearer planted-0123"))

    def test_short_and_ordinary_values_are_left(self) -> None:
        text = "a word: bearer, password, -----BEGIN"
        self.assertEqual(
            self.clean(text, "a", "", HIDDEN, "Bearer", "password", "-----BEGIN", "b\n\n\n\n\n\nc"), text
        )

    def test_secrets_that_overlap_leave_nothing(self) -> None:
        self.assertEqual(self.clean("a planted-one-two b", "planted-one", "one-two"), f"a {HIDDEN} b")

    def test_what_looks_like_a_secret_is_taken_out(self) -> None:
        for text in (
            KEY,
            "https://AAAA0123@github.com/",
            "Authorization: Basic OkFBQUE=",
            "Authorization: Bearer AAAAAAAAAA",
            "https://x/?X-Amz-Signature=AAAA",
        ):
            cleaned = self.clean(text)
            self.assertIn(HIDDEN, cleaned)
            for part in ("AAAA", "OkFB", "planted"):
                self.assertNotIn(part, cleaned)
        plain = "https://registry.example/a:b@sha256:0123 took 0.1 s"
        self.assertEqual(self.clean(plain), plain)

    def test_a_key_that_is_known_leaves_no_other_key(self) -> None:
        for known in (KEY, json.dumps(KEY)[1:-1], "-----BEGIN", "-----BEGIN PRIVATE KEY-----", "PRIVATE KEY"):
            for text in (OTHER, json.dumps(OTHER), json.dumps({"key": json.dumps(OTHER)})):
                self.assertNotIn("another", self.clean(f"a {text} b", known), known)

    def test_what_is_known_does_not_keep_the_rest_from_being_recognised(self) -> None:
        self.assertNotIn(
            "planted", self.clean("Authorization: Basic cGxhbnRlZA== planted", "Basic ", "horization")
        )

    def test_the_lines_of_a_known_key_are_found_each(self) -> None:
        for text in (
            KEY,
            json.dumps(KEY),
            *KEY.splitlines(),
            "\n".join(f"host: {each}" for each in KEY.splitlines()),
        ):
            self.assertNotIn("planted", self.clean(f"a {text} b", KEY))

    def test_a_document_is_cleaned_before_it_is_escaped(self) -> None:
        secret = 'pa"ss\nwörd-long'
        document = {"a": [{"why": f"no {secret}"}], secret: 1}
        cleaned = Scrubber([secret]).clean_document(document)
        self.assertEqual(cleaned, {"a": [{"why": f"no {HIDDEN}"}], HIDDEN: 1})
