# SPDX-License-Identifier: Apache-2.0
"""The catalogue in the configuration: every fault names its key."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from infranetes.config import Config
from infranetes.config.check import check_file
from infranetes.config.reading import load
from infranetes.images.machine.config import MachineImageConfig
from infranetes_common.errors import ConfigError

SUM = "0" * 64


class ConfigTests(SynchronousTestCase):
    def write(self, images: Mapping[str, str]) -> str:
        path = Path(self.mktemp())
        path.write_text("".join(f'[machine_images."{name}"]\n{keys}\n' for name, keys in images.items()))
        return str(path)

    def read(self, name: str, keys: str) -> Config:
        return load(self.write({name: keys}), {})

    def refused(self, name: str, keys: str) -> str:
        return str(self.assertRaises(ConfigError, self.read, name, keys))

    def test_images_are_read_by_name_and_version(self) -> None:
        found = self.read("team/debian:12.5", f'url = "https://a.example/b"\nsha256 = "{SUM}"\nagent = true')
        self.assertEqual(
            found.machine_images,
            {"team/debian:12.5": MachineImageConfig(url="https://a.example/b", sha256=SUM, agent=True)},
        )

    def test_each_fault_names_its_key(self) -> None:
        url = f'url = "https://a.example/b"\nsha256 = "{SUM}"'
        for name, keys, key, words in (
            ("a:1", f'url = "http://a.example/b"\nsha256 = "{SUM}"', ".url", "https"),
            ("a:1", f'url = "https:///b"\nsha256 = "{SUM}"', ".url", "https"),
            ("a:1", f'url = "https://u:secret@a.example/b"\nsha256 = "{SUM}"', ".url", "no user"),
            ("a:1", 'url = "https://a.example/b"', ".sha256", "needs the checksum"),
            ("a:1", 'url = "https://a.example/b"\nsha256 = "1"', ".sha256", "64 hex digits"),
            ("a:1", 'path = "disk.img"', ".path", "absolute"),
            ("a:1", f'{url}\npath = "/disk.img"', "", "either url or path"),
            ("a:1", "agent = false", "", "either url or path"),
            ("a:1", f'{url}\nformat = "vmdk"', ".format", "qcow2"),
            ("a:1", f'{url}\nmirror = "x"', ".mirror", "not known"),
            ("a", url, "", "a version"),
            ("A:1", url, "", "lower-case"),
            (f"a:1@sha256:{SUM}", url, "", "a version"),
        ):
            said = self.refused(name, keys)
            self.assertIn(f"machine_images.{name}{key}: ", said)
            self.assertIn(words, said)
            self.assertNotIn("secret", said)

    def test_a_check_looks_for_lent_files_and_asks_no_server(self) -> None:
        lent = Path(self.mktemp()).absolute()
        images = {
            "a:1": f'path = "{lent}"',
            "b:1": f'url = "https://a.example/b"\nsha256 = "{SUM}"',
        }
        checked = check_file(self.write(images))
        self.assertEqual([fault.key for fault in checked.faults], ["machine_images"])
        self.assertIn(f"a:1: {lent}", checked.faults[0].words)
        lent.touch()
        checked = check_file(self.write(images))
        self.assertEqual(checked.faults, [])
        self.assertIn("b:1: no server was asked", [fault.words for fault in checked.unseen])
