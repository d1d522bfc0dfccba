# SPDX-License-Identifier: Apache-2.0
"""Configuration files: what is taken, and that each error names file, key and what is expected."""

from __future__ import annotations

import enum
import ipaddress
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import attrs
from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from infranetes_common import config
from infranetes_common.config import Bytes, Seconds
from infranetes_common.errors import ConfigError


class Driver(enum.Enum):
    SYSTEMD = "systemd"
    CGROUPFS = "cgroupfs"


@attrs.frozen
class Registry:
    host: str
    insecure: bool = False
    password: str = config.secret(default="")


@attrs.frozen
class Pool:
    size: int = attrs.field(default=4, validator=attrs.validators.ge(1))
    token: str = config.secret(default="ok", validator=attrs.validators.max_len(4))
    least: int = attrs.field(default=0)

    @least.validator
    def _check(self, _attribute: Any, value: int) -> None:
        if value > self.size:
            raise ValueError("may not be over pool.size")


@attrs.frozen
class Settings:
    socket: Path
    threads: int = 8
    ratio: float = 0.5
    debug: bool = False
    name: str = "node"
    memory: Bytes = Bytes(0)
    grace: Seconds = Seconds(30.0)
    driver: Driver = Driver.SYSTEMD
    format: Literal["text", "json"] = "text"
    subnet: ipaddress.IPv4Network = ipaddress.IPv4Network("10.88.0.0/16")
    log: Path | None = None
    mirrors: tuple[str, ...] = ()
    ports: list[int] = attrs.field(factory=list)
    pool: Pool = attrs.field(factory=Pool)
    registries: tuple[Registry, ...] = ()
    limits: dict[str, int] = attrs.field(factory=dict)
    provider: Mapping[str, dict[str, Any]] = attrs.field(factory=dict)


WHOLE = """
socket = "/run/it.sock"
threads = 3
ratio = 1
debug = true
name = "eins"
memory = "1.5 GiB"
grace = "200ms"
driver = "cgroupfs"
format = "json"
subnet = "10.1.0.0/24"
log = "/var/log/it"
mirrors = ["a", "b"]
ports = [1, 2]
limits = { open = 1024 }

[pool]
size = 2

[[registries]]
host = "localhost:5000"
insecure = true

[provider.qemu]
image = "/somewhere"
"""


class ConfigTestCase(SynchronousTestCase):
    def write(self, text: str | bytes) -> str:
        path = Path(self.mktemp())
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    def refused(self, text: str, overrides: Mapping[str, Any] | None = None) -> str:
        """The words for a file of `text`, without the file's name, which must be there."""
        path = self.write(text)
        error = str(self.assertRaises(ConfigError, config.load, path, Settings, overrides))
        for line in error.splitlines():
            self.assertTrue(line.startswith((f"{path}: ", "command line: ")), line)
        return error.replace(f"{path}: ", "")


class TakenTests(ConfigTestCase):
    def test_every_kind_of_value(self) -> None:
        self.assertEqual(
            config.load(self.write(WHOLE), Settings),
            Settings(
                socket=Path("/run/it.sock"),
                threads=3,
                ratio=1.0,
                debug=True,
                name="eins",
                memory=Bytes(1536 * 1024 * 1024),
                grace=Seconds(0.2),
                driver=Driver.CGROUPFS,
                format="json",
                subnet=ipaddress.IPv4Network("10.1.0.0/24"),
                log=Path("/var/log/it"),
                mirrors=("a", "b"),
                ports=[1, 2],
                limits={"open": 1024},
                pool=Pool(size=2),
                registries=(Registry("localhost:5000", insecure=True),),
                provider={"qemu": {"image": "/somewhere"}},
            ),
        )

    def test_defaults_where_nothing_is_said(self) -> None:
        self.assertEqual(config.load(self.write('socket = "/s"'), Settings), Settings(socket=Path("/s")))

    def test_flags_win_over_the_file(self) -> None:
        path = self.write(WHOLE)
        loaded = config.load(path, Settings, {"socket": "/other", "pool.size": 9, "name": None})
        self.assertEqual((loaded.socket, loaded.pool.size, loaded.name), (Path("/other"), 9, "eins"))

    def test_flags_alone_are_enough(self) -> None:
        loaded = config.load(None, Settings, {"socket": Path("/s"), "pool.size": 1})
        self.assertEqual(loaded, Settings(socket=Path("/s"), pool=Pool(size=1)))

    def test_sizes_and_times_have_units(self) -> None:
        for text, size in (("7", 7), ('"7"', 7), ('"2KiB"', 2048), ('"2 kB"', 2000), ('"1TiB"', 2**40)):
            self.assertEqual(
                config.load(self.write(f'socket = "/s"\nmemory = {text}'), Settings).memory, size
            )
        for text, seconds in (("7", 7.0), ("0.5", 0.5), ('"4m"', 240.0), ('"1.5h"', 5400.0)):
            self.assertEqual(
                config.load(self.write(f'socket = "/s"\ngrace = {text}'), Settings).grace, seconds
            )

    def test_a_table_of_a_plug_in_is_structured_by_its_own_class(self) -> None:
        pool = config.structure({"size": 3}, Pool, source="f", prefix="provider.x")
        self.assertEqual(pool, Pool(size=3))
        error = self.assertRaises(
            ConfigError, config.structure, {"size": "3"}, Pool, source="f", prefix="provider.x"
        )
        self.assertEqual(str(error), "f: provider.x.size: an integer is expected, not a string")


class RefusedTests(ConfigTestCase):
    def test_nothing_is_converted_in_silence(self) -> None:
        for line, words in (
            ('threads = "5"', "threads: an integer is expected, not a string"),
            ("threads = 5.0", "threads: an integer is expected, not a number"),
            ("threads = true", "threads: an integer is expected, not true or false"),
            ("debug = 1", "debug: true or false is expected, not an integer"),
            ('debug = "true"', "debug: true or false is expected, not a string"),
            ("name = 5", "name: a string is expected, not an integer"),
            ("ratio = true", "ratio: a number is expected, not true or false"),
            ("ratio = nan", "ratio: a finite number is expected"),
            ("log = 5", "log: a path is expected, not an integer"),
            ('log = ""', "log: a path is expected, not an empty string"),
            ("mirrors = 5", "mirrors: a list is expected, not an integer"),
            ('mirrors = "a"', "mirrors: a list is expected, not a string"),
            ('mirrors = ["a", 5]', "mirrors.2: a string is expected, not an integer"),
            ("limits = [1]", "limits: a table is expected, not a list"),
            ("limits = { open = 1.5 }", "limits.open: an integer is expected, not a number"),
            ("pool = 5", "pool: a table is expected, not an integer"),
            ("memory = true", 'memory: a size, such as "512MiB" is expected, not true or false'),
            ("memory = -1", 'memory: a size, such as "512MiB" is expected, not below 0 or out of range'),
            ("grace = nan", 'grace: a time, such as "30s" is expected, not below 0 or out of range'),
            ('driver = "other"', "driver: one of systemd, cgroupfs is expected"),
            ("format = 5", "format: one of text, json is expected"),
            ('subnet = "10.0.0.1/16"', "subnet: an IPv4 subnet, such as 10.88.0.0/16 is expected"),
            ("subnet = 5", "subnet: an IPv4 subnet, such as 10.88.0.0/16 is expected, not an integer"),
        ):
            self.assertEqual(self.refused(f'socket = "/s"\n{line}'), words)

    def test_an_unknown_unit_tells_the_known_ones(self) -> None:
        self.assertIn("KiB, MiB", self.refused('socket = "/s"\nmemory = "5 MB!"'))
        self.assertIn("ms, s, m, h", self.refused('socket = "/s"\ngrace = "5 days"'))

    def test_an_unknown_key_is_named_with_the_likeliest_one(self) -> None:
        self.assertEqual(
            self.refused('socket = "/s"\nthread = 5'), "thread: not known; did you mean threads?"
        )
        self.assertEqual(
            self.refused('socket = "/s"\n[pool]\nqwxyz = 5'),
            "pool.qwxyz: not known; known are size, token, least",
        )

    def test_a_missing_key_is_named_with_what_belongs_there(self) -> None:
        self.assertEqual(self.refused("threads = 5"), "socket: missing; a path is expected")
        self.assertEqual(
            self.refused('socket = "/s"\n[[registries]]\n'),
            "registries.1.host: missing; a string is expected",
        )

    def test_all_that_is_wrong_is_told_at_once(self) -> None:
        words = self.refused('thread = 5\nname = 7\n[pool]\nsize = "x"\n')
        self.assertEqual(
            sorted(words.splitlines()),
            [
                "name: a string is expected, not an integer",
                "pool.size: an integer is expected, not a string",
                "socket: missing; a path is expected",
                "thread: not known; did you mean threads?",
            ],
        )

    def test_a_validators_words_stand_after_the_key(self) -> None:
        self.assertEqual(self.refused('socket = "/s"\n[pool]\nsize = 0'), "pool.size: 0 is not >= 1")
        self.assertEqual(
            self.refused('socket = "/s"\n[pool]\nsize = 1\nleast = 2'),
            "pool.least: may not be over pool.size",
        )

    def test_a_flag_that_is_wrong_is_not_blamed_on_the_file(self) -> None:
        self.assertEqual(
            self.refused('socket = "/s"', {"pool.size": 0, "thread": 1}).splitlines(),
            [
                "command line: thread: not known; did you mean threads?",
                "command line: pool.size: 0 is not >= 1",
            ],
        )

    def test_a_flag_under_what_is_no_table(self) -> None:
        self.assertEqual(
            self.refused('socket = "/s"\npool = 5', {"pool.size": 1}),
            "pool: a table is expected, not an integer",
        )

    def test_a_secret_is_never_quoted(self) -> None:
        for line in ('token = "hunter2"', "token = 424242", 'token = ["hunter2"]'):
            words = self.refused(f'socket = "/s"\n[pool]\n{line}')
            self.assertTrue(words.startswith("pool.token: "), words)
            self.assertNotIn("hunter2", words)
            self.assertNotIn("424242", words)

    def test_a_secret_is_in_no_repr(self) -> None:
        self.assertNotIn("hunter2", repr(Registry("h", password="hunter2")))


class FileTests(ConfigTestCase):
    def test_a_missing_file_is_named(self) -> None:
        error = self.assertRaises(ConfigError, config.load, "/does/not/exist.toml", Settings)
        self.assertEqual(str(error), "/does/not/exist.toml: can't be read: No such file or directory")

    def test_a_directory_is_no_file(self) -> None:
        path = self.mktemp()
        os.mkdir(path)
        error = self.assertRaises(ConfigError, config.load, path, Settings)
        self.assertEqual(str(error), f"{path}: can't be read: Is a directory")

    def test_what_is_no_toml_is_told_with_its_line(self) -> None:
        self.assertIn("not TOML: threads: not a value: ", self.refused('socket = "/s"\nthreads = \n'))
        self.assertIn("(at line 3, ", self.refused('socket = "/s"\n\nthreads 5\n'))
        self.assertIn("not TOML", self.refused("a = " + "[" * 100_000))

    def test_what_is_no_text_is_told_with_its_line(self) -> None:
        path = self.write(b'socket = "/s"\nname = "\xff"\n')
        error = self.assertRaises(ConfigError, config.load, path, Settings)
        self.assertEqual(str(error), f"{path}: line 2: not UTF-8 text")

    def test_a_file_beyond_all_bounds_is_not_read(self) -> None:
        error = self.assertRaises(ConfigError, config.load, "/dev/zero", Settings)
        self.assertIn("over 1048576 bytes", str(error))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.dates(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
KEYS = st.sampled_from([attribute.name for attribute in attrs.fields(Settings)]) | st.text()


class AnythingTests(SynchronousTestCase):
    @given(st.dictionaries(KEYS, VALUES))
    def test_any_table_is_taken_or_refused_in_words(self, table: dict[str, Any]) -> None:
        try:
            config.structure(table, Settings, source="f")
        except ConfigError as error:
            self.assertTrue(str(error).startswith("f: "))
