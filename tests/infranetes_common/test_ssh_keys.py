# SPDX-License-Identifier: Apache-2.0
"""SSH's public keys as text."""

from __future__ import annotations

import base64

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.ssh_keys import MAX_KEY, authorized_key

ED25519 = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIDIhz2GK/XCUj4i6Q5yQJNL1MKqHbhzwLR8HCNbpO3fV alice@home"


def _rsa() -> str:
    parts = (b"ssh-rsa", b"\x01\x00\x01", b"\0" + b"\xc5" * 256)
    blob = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return f"ssh-rsa {base64.b64encode(blob).decode()}"


RSA = _rsa()


class AuthorizedKeyTests(SynchronousTestCase):
    def test_keys_as_openssh_writes_them_are_taken(self) -> None:
        form = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        made = [
            key.public_bytes(*form).decode()
            for key in (
                ed25519.Ed25519PrivateKey.generate().public_key(),
                ec.generate_private_key(ec.SECP256R1()).public_key(),
                ec.generate_private_key(ec.SECP521R1()).public_key(),
            )
        ]
        for line in (ED25519, RSA, *made):
            self.assertEqual(authorized_key(f"  {line}\r\n"), line)

    def test_options_before_the_key_are_part_of_the_line(self) -> None:
        line = f'no-pty,from="10.0.0.0/8,192.168.0.1",command="echo \\"hi, you\\"" {ED25519}'
        self.assertEqual(authorized_key(line), line)

    def test_what_is_no_public_key_is_refused_and_not_quoted(self) -> None:
        kind, key, _ = ED25519.split()
        swapped = f"ssh-rsa {key}"
        for line in (
            "", "alice", kind, f"{kind} {key[:-8]}", f"{kind} {key[:-4]}A===", swapped, f"{kind}  !!", key,
            f"{kind} {key} two\nlines", f"{kind} {key} nul\0", f"{ED25519}{'x' * MAX_KEY}",
            "-----BEGIN RSA PRIVATE KEY-----",
        ):  # fmt: skip
            error = self.assertRaises(ValueError, authorized_key, line)
            self.assertNotIn(key[20:40], str(error))

    def test_a_private_key_is_named_as_such(self) -> None:
        error = self.assertRaises(ValueError, authorized_key, "-----BEGIN OPENSSH PRIVATE KEY-----")
        self.assertIn(".pub", str(error))
