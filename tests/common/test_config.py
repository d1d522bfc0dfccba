"""A configuration is structured as its classes say, and each error names the key."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import attrs
from twisted.trial.unittest import SynchronousTestCase

from infranetes_common import config
from infranetes_common.errors import ConfigError


class Kind(enum.Enum):
    HARD = "hard"
    SOFT = "soft"


@attrs.frozen
class Inner:
    count: int = attrs.field(validator=attrs.validators.ge(1))
    name: str = "x"


@attrs.frozen
class Outer:
    on: bool = False
    number: float = 1.0
    path: Path = Path("/tmp")
    inner: Inner = Inner(1)
    many: tuple[Inner, ...] = ()
    words: list[str] = attrs.field(factory=list)
    tables: Mapping[str, Mapping[str, Any]] = attrs.field(factory=dict)
    maybe: int | None = None
    kind: Kind = Kind.HARD
    mode: Literal["a", "b"] = "a"


class ConfigTests(SynchronousTestCase):
    def written(self, text: str | bytes) -> str:
        path: str = self.mktemp()
        Path(path).write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    def refused(self, text: str | bytes, cls: type = Outer) -> str:
        path = self.written(text)
        error = str(self.assertRaises(ConfigError, config.load, path, cls))
        self.assertTrue(error.startswith(path), error)
        return error.removeprefix(path + ": ")

    def test_an_empty_file_is_all_defaults(self) -> None:
        self.assertEqual(config.load(self.written(""), Outer), Outer())

    def test_every_kind_of_value(self) -> None:
        text = """
            on = true
            number = 2
            path = "/var"
            words = ["a", "b"]
            maybe = 3
            kind = "soft"
            mode = "b"
            inner = {count = 2}
            [[many]]
            count = 3
            name = "y"
            [tables.qemu]
            anything = [1, {goes = "here"}]
        """
        self.assertEqual(
            config.load(self.written(text), Outer),
            Outer(
                on=True,
                number=2.0,
                path=Path("/var"),
                words=["a", "b"],
                maybe=3,
                kind=Kind.SOFT,
                mode="b",
                inner=Inner(2),
                many=(Inner(3, "y"),),
                tables={"qemu": {"anything": [1, {"goes": "here"}]}},
            ),
        )

    def test_each_wrong_value_is_named_with_its_key_and_what_is_expected(self) -> None:
        for text, words in (
            ("of = true", "of: unknown key; known are on, number"),
            ('on = "yes"', "on: expected true or false, not 'yes'"),
            ("on = 1", "on: expected true or false, not 1"),
            ("number = true", "number: expected a number, not true"),
            ('number = "1"', "number: expected a number, not '1'"),
            ("path = 1", "path: expected a path, not 1"),
            ("inner = 1", "inner: expected a table, not 1"),
            ("inner = {}", "inner.count: has to be given: a whole number"),
            ("inner = {count = 1.5}", "inner.count: expected a whole number, not 1.5"),
            ("inner = {count = 1, nam = 2}", "inner.nam: unknown key; known are count, name"),
            ("inner = {count = 0}", "inner.count: 'count' must be >= 1: 0"),
            ("many = [{count = 1}, {count = 'x'}]", "many.1.count: expected a whole number, not 'x'"),
            ("many = {count = 1}", "many: expected a list, not a table"),
            ('words = "abc"', "words: expected a list, not 'abc'"),
            ("words = [1]", "words.0: expected a text, not 1"),
            ("tables = {qemu = 1}", "tables.qemu: expected a table, not 1"),
            ("maybe = 'x'", "maybe: expected a whole number, not 'x'"),
            ("kind = 'odd'", "kind: expected one of 'hard', 'soft', not 'odd'"),
            ("mode = 'c'", "mode: expected one of 'a', 'b', not 'c'"),
        ):
            said = self.refused(text)
            self.assertTrue(said.startswith(words), f"{text}: {said}")

    def test_a_file_that_is_no_configuration_is_named(self) -> None:
        self.assertIn("not TOML", self.refused("= 1"))
        self.assertIn("not TOML", self.refused(b"\xff\xfe"))
        self.assertIn("over 1048576 bytes", self.refused("#" * 1048577))
        missing = str(self.assertRaises(ConfigError, config.load, "/nonexistent/x.toml", Outer))
        self.assertEqual(missing, "/nonexistent/x.toml: can't be read: No such file or directory")
        self.assertIn("Is a directory", str(self.assertRaises(ConfigError, config.load, "/", Outer)))

    def test_of_a_long_wrong_value_only_the_start_is_shown(self) -> None:
        said = self.refused(f"number = '{'k' * 500}'")
        self.assertLess(len(said), 100)

    def test_a_table_names_its_origin(self) -> None:
        error = self.assertRaises(ConfigError, config.structure, {"count": "x"}, Inner, "provider.simulated")
        self.assertEqual(str(error), "provider.simulated: count: expected a whole number, not 'x'")
