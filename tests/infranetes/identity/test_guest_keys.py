# SPDX-License-Identifier: Apache-2.0
"""The secrets of guests are always the same, and each guest has its own."""

from __future__ import annotations

import stat
import tempfile
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from infranetes.identity.guest_keys import SEED_BYTES, GuestSecrets
from infranetes_common.errors import ConfigError


class GuestSecretsTests(SynchronousTestCase):
    def setUp(self) -> None:
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = Path(directory.name) / "state"

    @property
    def file(self) -> Path:
        return self.directory / "ca" / "guests.key"

    def test_each_guest_and_purpose_has_its_own_and_the_next_daemon_makes_the_same(self) -> None:
        pairs = [(purpose, id) for purpose in ("host", "user") for id in ("a", "b")]
        first = [GuestSecrets(self.directory).seed(*pair) for pair in pairs]
        self.assertEqual(len({*first}), 4)
        self.assertEqual({len(each) for each in first}, {SEED_BYTES})
        self.assertEqual([GuestSecrets(self.directory).seed(*pair) for pair in pairs], first)

    def test_a_purpose_and_an_id_are_not_mixed_up(self) -> None:
        secrets = GuestSecrets(self.directory)
        self.assertNotEqual(secrets.seed("host", "a"), secrets.seed("hos", "ta"))

    def test_another_node_makes_others(self) -> None:
        other = GuestSecrets(self.directory / "other").seed("host", "a")
        self.assertNotEqual(GuestSecrets(self.directory).seed("host", "a"), other)

    def test_nobody_else_can_read_it(self) -> None:
        GuestSecrets(self.directory)
        self.assertEqual(stat.S_IMODE(self.file.stat().st_mode), 0o600)
        self.assertEqual(stat.S_IMODE(self.file.parent.stat().st_mode), 0o700)

    def test_one_that_was_not_written_to_its_end_is_made_anew(self) -> None:
        GuestSecrets(self.directory)
        self.file.write_bytes(b"half")
        (self.file.parent / ".guests.key").write_bytes(b"killed while this was written")
        self.assertEqual(
            GuestSecrets(self.directory).seed("host", "a"), GuestSecrets(self.directory).seed("host", "a")
        )
        self.assertEqual(self.file.stat().st_size, SEED_BYTES)

    def test_a_directory_that_can_not_be_used_is_told(self) -> None:
        self.directory.parent.mkdir(exist_ok=True)
        self.directory.write_text("a file")
        self.assertIn("guests.key", str(self.assertRaises(ConfigError, GuestSecrets, self.directory)))
