# SPDX-License-Identifier: Apache-2.0
"""A configuration's drop-ins: what they change, in which order, and that each error names its own file."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import attrs
from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from infranetes_common import config
from infranetes_common.config_files import Place, read
from infranetes_common.config_lines import lines_of
from infranetes_common.errors import ConfigError


@attrs.frozen
class Log:
    level: str = "info"
    format: str = "text"


@attrs.frozen
class Settings:
    socket: str = ""
    names: tuple[str, ...] = ()
    log: Log = Log()


class DropInCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.root = Path(self.mktemp()).absolute()
        self.root.mkdir()
        self.main = self.root / "x.toml"
        self.main.write_text("")

    def drop_in(self, name: str, text: str) -> Path:
        path = self.root / "x.toml.d" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path


class DropInTests(DropInCase):
    def loaded(self) -> Settings:
        return config.load(self.main, Settings)

    def refused(self) -> str:
        return str(self.assertRaises(ConfigError, self.loaded))

    def test_the_last_by_name_wins_key_by_key(self) -> None:
        self.main.write_text('socket = "/a"\nnames = ["a", "b"]\n[log]\nlevel = "warn"\n')
        self.drop_in("20-b.toml", '[log]\nformat = "json"\nlevel = "error"\n')
        self.drop_in("10-a.toml", 'names = ["c"]\nlog = {level = "debug"}\n')
        self.assertEqual(self.loaded(), Settings("/a", ("c",), Log("error", "json")))

    def test_without_any_all_is_as_the_file_says(self) -> None:
        self.main.write_text('socket = "/a"\n')
        self.assertEqual(read(self.main).sources.files, (str(self.main),))
        self.drop_in("x.toml", "").unlink()  # an empty directory
        self.assertEqual(self.loaded(), Settings("/a"))

    def test_other_files_are_not_read(self) -> None:
        for name in (".10-a.toml", "10-a.toml~", "10-a.conf", "README"):
            self.drop_in(name, "not TOML")
        self.assertEqual(self.loaded(), Settings())

    def test_errors_name_the_file_that_has_the_key(self) -> None:
        self.main.write_text("socket = 1\n")
        a = self.drop_in("a.toml", "[log]\nlevel = 2\nlevl = 3\n")
        b = self.drop_in("b.toml", "[log]\nformat = 4\n")
        self.assertEqual(
            sorted(self.refused().splitlines()),
            sorted(
                [
                    f"{self.main}: socket: a string is expected, not an integer",
                    f"{a}: log.levl: not known; did you mean level?",
                    f"{a}: log.level: a string is expected, not an integer",
                    f"{b}: log.format: a string is expected, not an integer",
                ]
            ),
        )

    def test_a_value_that_a_later_file_replaces_is_not_blamed(self) -> None:
        self.main.write_text("socket = 1\n")
        self.drop_in("a.toml", 'socket = "/a"\n')
        self.assertEqual(self.loaded().socket, "/a")

    def test_a_table_and_a_value_do_not_mix(self) -> None:
        a = self.drop_in("a.toml", "log = 1\n")
        self.main.write_text('[log]\nlevel = "warn"\n')
        self.assertEqual(self.refused(), f"{a}: log: a table is expected, not an integer")

    def test_one_that_cannot_be_read_or_is_no_toml_is_named(self) -> None:
        path = self.drop_in("a.toml", "level = \n")
        self.assertTrue(self.refused().startswith(f"{path}: not TOML: "))
        path.unlink()
        path.mkdir()
        self.assertEqual(self.refused(), f"{path}: can't be read: Is a directory")
        path.rmdir()
        os.symlink("nowhere", path)
        self.assertEqual(self.refused(), f"{path}: can't be read: No such file or directory")


class PlaceTests(DropInCase):
    def test_every_key_is_placed_where_its_value_is_from(self) -> None:
        self.main.write_text('# words\nsocket = "/a"\n\n[log]\nlevel = "warn"\nformat = "text"\n')
        drop_in = self.drop_in("a.toml", '[log]\n\nlevel = "debug"\n')
        places = read(self.main).sources.places
        self.assertEqual(
            places,
            {
                "socket": Place(str(self.main), 2),
                "log": Place(str(self.main), 4),
                "log.format": Place(str(self.main), 6),
                "log.level": Place(str(drop_in), 3),
            },
        )

    def test_lines_of_everything_that_toml_has(self) -> None:
        text = (
            'a.b = 1\n"c.d" = """\n# no comment\ne = 1\n"""\nf = [\n  "]", # ]\n  {g = 2},\n]\n'
            "h = {i = {j = 3}}\r\n[k] # words\n[[k.l]]\nm = 4\n[[k.l]]\n[k.l.n]\no = 5\n"
        )
        tomllib.loads(text)
        self.assertEqual(
            lines_of(text),
            {
                **{"a": 1, "a.b": 1, "c.d": 2, "f": 6, "f.1": 6, "f.2": 6, "f.2.g": 6},
                **{"h": 10, "h.i": 10, "h.i.j": 10, "k": 11, "k.l": 12, "k.l.1": 12, "k.l.1.m": 13},
                **{"k.l.2": 14, "k.l.2.n": 15, "k.l.2.n.o": 16},
            },
        )

    @given(st.text(alphabet="ab.=[]{}\"'#\\\n\r 1,", max_size=40))
    def test_whatever_tomllib_reads_has_lines(self, text: str) -> None:
        try:
            table = tomllib.loads(text)
        except tomllib.TOMLDecodeError:
            return
        lines = lines_of(text)
        self.assertEqual({key for key in table if key not in lines}, set())
        self.assertTrue(all(1 <= line <= text.count("\n") + 1 for line in lines.values()))
