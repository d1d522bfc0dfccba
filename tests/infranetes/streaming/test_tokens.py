# SPDX-License-Identifier: Apache-2.0
"""A token stands for one request, can be used once, and is valid for a minute."""

from __future__ import annotations

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from infranetes.streaming.requests import StreamRequest
from infranetes.streaming.tokens import LIFETIME, MAX_OUTSTANDING, Tokens
from infranetes_common.errors import ResourceExhausted
from infranetes_common.wire import cri

REQUEST = cri.ExecRequest(container_id="c")


class TokensTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.tokens: Tokens[StreamRequest] = Tokens(self.clock)

    def test_a_token_is_good_once(self) -> None:
        token = self.tokens.issue("exec", REQUEST)
        self.assertEqual(self.tokens.redeem("exec", token), REQUEST)
        self.assertIsNone(self.tokens.redeem("exec", token))

    def test_a_token_is_good_for_its_kind_alone(self) -> None:
        self.assertIsNone(self.tokens.redeem("attach", self.tokens.issue("exec", REQUEST)))

    def test_a_token_is_good_for_a_minute(self) -> None:
        early, late = self.tokens.issue("exec", REQUEST), self.tokens.issue("exec", REQUEST)
        self.clock.advance(LIFETIME - 1)
        self.assertEqual(self.tokens.redeem("exec", early), REQUEST)
        self.clock.advance(1)
        self.assertIsNone(self.tokens.redeem("exec", late))

    def test_tokens_are_bounded_until_they_expire(self) -> None:
        for _ in range(MAX_OUTSTANDING):
            self.tokens.issue("exec", REQUEST)
        with self.assertRaises(ResourceExhausted):
            self.tokens.issue("exec", REQUEST)
        self.clock.advance(LIFETIME)
        self.tokens.issue("exec", REQUEST)

    def test_tokens_cannot_be_guessed(self) -> None:
        tokens = {self.tokens.issue("exec", REQUEST) for _ in range(100)}
        self.assertEqual(len(tokens), 100)
        self.assertTrue(all(len(token) >= 32 for token in tokens))
