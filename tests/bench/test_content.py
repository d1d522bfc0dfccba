# SPDX-License-Identifier: Apache-2.0
"""A large image's layers have, together, the files of the tar that they are made from."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from tests.support.debian import layers

EACH = 4096


class LayersTests(SynchronousTestCase):
    def tar(self, files: Mapping[str, bytes | str]) -> Path:
        """A tar of files and, where the content is a text, hard links."""
        path = Path(self.mktemp())
        with tarfile.open(path, "w") as made:
            for name, content in files.items():
                member = tarfile.TarInfo(name)
                if isinstance(content, str):
                    member.type, member.linkname = tarfile.LNKTYPE, content
                    made.addfile(member)
                else:
                    member.size, member.mode = len(content), 0o755
                    made.addfile(member, io.BytesIO(content))
        return path

    def divided(self, files: Mapping[str, bytes | str]) -> list[dict[str, bytes]]:
        """The files of each layer with their content."""
        found = []
        for layer in layers(self.tar(files), EACH):
            with tarfile.open(fileobj=io.BytesIO(layer)) as tar:
                found.append({each.name: tar.extractfile(each).read() for each in tar})
        return found

    def test_every_file_is_in_one_layer(self) -> None:
        files = {f"bin/{number}": bytes([number]) * 1500 for number in range(9)}
        divided = self.divided(files)
        self.assertGreater(len(divided), 2)
        self.assertEqual(sum(len(each) for each in divided), len(files))
        self.assertEqual({name: content for each in divided for name, content in each.items()}, files)

    def test_a_hard_link_stays_with_its_file_or_goes(self) -> None:
        divided = self.divided({"a": b"a" * 100, "near": "a", "b": bytes(EACH), "c": b"c", "far": "a"})
        self.assertEqual([[*each] for each in divided], [["a", "near", "b"], ["c"]])
        self.assertEqual(divided[0]["near"], b"a" * 100)

    def test_a_small_tar_is_one_layer(self) -> None:
        self.assertEqual(self.divided({"a": b"a"}), [{"a": b"a"}])
