# SPDX-License-Identifier: Apache-2.0
"""Keys of users and servers."""

from __future__ import annotations

from twisted.conch.ssh.keys import FingerprintFormats, Key
from twisted.trial.unittest import SynchronousTestCase

from infranetes.machines.agentless.ssh.keys import fingerprint, key_blob, key_line, make_key
from infranetes_common.errors import InvalidArgument
from infranetes_common.ssh_keys import authorized_key


class KeyTests(SynchronousTestCase):
    def test_a_key_is_one_that_ssh_programs_read(self) -> None:
        made = make_key("me")
        private, public = Key.fromString(made.private.encode()), Key.fromString(made.public.encode())
        self.assertEqual(private.public(), public)
        self.assertTrue(made.private.startswith("-----BEGIN OPENSSH PRIVATE KEY-----\n"))
        self.assertTrue(made.public.startswith("ssh-ed25519 ") and made.public.endswith(" me"))
        self.assertEqual(authorized_key(made.public), made.public)
        self.assertNotEqual(make_key().private, make_key().private)

    def test_a_private_key_is_not_shown(self) -> None:
        made = make_key()
        self.assertNotIn(made.private.splitlines()[1], repr(made))

    def test_a_line_and_what_ssh_sends_are_the_same_key(self) -> None:
        made = make_key("with a comment")
        blob = key_blob(made.public)
        self.assertEqual(blob, Key.fromString(made.public.encode()).blob())
        self.assertEqual(key_line(blob), " ".join(made.public.split()[:2]))
        self.assertEqual(key_blob(f'from="10.0.0.1" {made.public}'), blob)

    def test_a_line_that_is_none_is_refused_without_being_quoted(self) -> None:
        for text in ("", "ssh-ed25519", "ssh-ed25519 AAAA", make_key().private, "hunter2"):
            with self.assertRaises(InvalidArgument) as caught:
                key_blob(text)
            self.assertNotIn("hunter2", str(caught.exception))

    def test_a_fingerprint_is_as_ssh_keygen_has_it(self) -> None:
        line = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ2hVn3N0O0qyHNl0QmJzrc0mZqQj2v3m8D0bQq8oJ5M"
        found = fingerprint(key_blob(line))
        expected = Key.fromString(line.encode()).fingerprint(FingerprintFormats.SHA256_BASE64)
        self.assertEqual(found, f"SHA256:{expected.rstrip('=')}")
