# SPDX-License-Identifier: Apache-2.0
"""Which nft the tree's own is, by two programs that write down what they are asked; one can be killed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from delivery import tree

# As nft does, it fails for a table that is not there.
PROGRAM = """\
#!/bin/sh
echo "{name} $*" >>"{calls}"
[ ! -e "{killed}" ] || kill -SEGV $$
[ "$1" != -c ] || exit 1
echo "{name} has read $(cat)"
exit 3
"""


class NftTests(SynchronousTestCase):
    def setUp(self) -> None:
        top = Path(self.mktemp()).absolute()
        self.home = top / "tree"
        self.calls, self.killed, self.marker = top / "calls", top / "killed", top / "run/newer-nft"
        self.marker.parent.mkdir(parents=True)
        for name in ("older", "newer"):
            killed = self.killed if name == "older" else top / "never"
            text = PROGRAM.format(name=name, calls=self.calls, killed=killed)
            self.write(f"usr/libexec/nft/{name}/nft", text)
        self.write("usr/bin/nft", tree.nft(str(self.home)))
        dash = shutil.which("dash") or shutil.which("sh")
        assert dash is not None
        (self.home / "usr/bin/dash").symlink_to(dash)

    def write(self, path: str, text: str) -> None:
        file = self.home / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)

    def nft(self, *words: str) -> tuple[int, str, list[str]]:
        """Return its exit code and output, and what was asked of which."""
        self.calls.write_text("")
        done = subprocess.run(
            [self.home / "usr/bin/nft", *words],
            check=False,
            input="add table ip a\n",
            capture_output=True,
            text=True,
            env={**os.environ, "INFRANETES_NFT_MARKER": str(self.marker)},
        )
        self.assertEqual(done.stderr, "")
        return done.returncode, done.stdout, self.calls.read_text().splitlines()

    def test_it_is_the_older_one_which_others_programs_can_read(self) -> None:
        code, said, calls = self.nft("-f", "-")
        self.assertEqual((code, said), (3, "older has read add table ip a\n"))
        self.assertEqual(calls[1:], ["older -f -"])
        self.assertFalse(self.marker.exists())

    def test_it_is_the_newer_one_once_the_older_was_killed_which_is_not_started_again(self) -> None:
        self.killed.touch()
        code, said, calls = self.nft("-f", "-")
        self.assertEqual((code, said), (3, "newer has read add table ip a\n"))
        self.assertEqual(calls, ["older -c delete table ip infranetes-none", "newer -f -"])
        self.assertEqual(self.nft("-j", "list", "tables")[2], ["newer -j list tables"])

    def test_what_older_can_say_is_looked_at_anew_after_a_boot_or_where_nothing_can_be_kept(self) -> None:
        self.killed.touch()
        self.nft("-f", "-")
        self.marker.unlink()
        self.killed.unlink()
        self.assertEqual(self.nft("-f", "-")[1], "older has read add table ip a\n")
        self.killed.touch()
        self.marker.parent.rmdir()
        for _ in range(2):
            self.assertEqual(self.nft("-f", "-")[1], "newer has read add table ip a\n")
