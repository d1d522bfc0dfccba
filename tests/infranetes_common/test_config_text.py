# SPDX-License-Identifier: Apache-2.0
"""Configurations as keys and TOML: what is written is read as the same again."""

from __future__ import annotations

import tomllib
from pathlib import Path

import attrs
from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.config import Bytes, secret, structure
from infranetes_common.config_text import Setting, defaults, settings, toml


@attrs.frozen
class Inner:
    name: str
    size: Bytes = Bytes(1 << 30)


@attrs.frozen
class Whole:
    region: str
    path: Path = Path("/a b")
    inner: Inner = Inner("x")
    inners: tuple[Inner, ...] = ()
    tables: dict[str, Inner] = attrs.field(factory=dict)
    password: str = secret(default="")
    nothing: str | None = None


def by_key(found: Whole) -> dict[str, Setting]:
    return {each.key: each for each in settings(found)}


class TomlTests(SynchronousTestCase):
    @given(
        st.recursive(
            st.booleans()
            | st.integers(-(2**63), 2**63 - 1)
            | st.floats(allow_nan=False, allow_infinity=False)
            | st.text(),
            lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        )
    )
    def test_any_value_is_read_as_it_was(self, value: object) -> None:
        self.assertEqual(tomllib.loads(f"value = {toml(value)}"), {"value": value})

    def test_what_toml_has_not_is_nothing(self) -> None:
        self.assertEqual(toml(None), "")


class SettingsTests(SynchronousTestCase):
    def test_a_configuration_that_is_written_and_read_is_the_same(self) -> None:
        given = Whole("r", inners=(Inner("a"), Inner("b", Bytes(5))), tables={"t": Inner("c")})
        found: dict[str, object] = tomllib.loads(
            "\n".join(f"{each.key} = {each.text}" for each in settings(given) if each.text)
        )
        self.assertEqual(structure(found, Whole, source="test"), given)

    def test_tables_have_dotted_keys(self) -> None:
        self.assertEqual(by_key(Whole("r"))["inner.size"].text, '"1GiB"')
        self.assertEqual(by_key(Whole("r", tables={"t": Inner("c")}))["tables.t.name"].text, '"c"')

    def test_what_is_secret_is_neither_shown_nor_represented(self) -> None:
        found = by_key(Whole("r", password="hunter2"))["password"]
        self.assertEqual((found.value, found.secret, found.shown), ("hunter2", True, ""))
        self.assertNotIn("hunter2", repr(found))

    def test_what_looks_like_a_secret_is_not_shown(self) -> None:
        found = by_key(Whole("https://me:hunter2@example.org/x"))["region"]
        self.assertEqual(found.shown, '"https://(hidden)@example.org/x"')
        for value in (
            "-----BEGIN PRIVATE KEY-----\nhunter2",
            'https://x/?sig=hunter2&a="b"',
            "token='hunter2\"",
        ):
            shown = by_key(Whole(value))["region"].shown
            self.assertNotIn("hunter2", shown)
            self.assertIn("(hidden)", tomllib.loads(f"value = {shown}")["value"])
        ordinary = 'a "b" \\ c\x7f'
        self.assertEqual(
            tomllib.loads(f"value = {by_key(Whole(ordinary))['region'].shown}")["value"], ordinary
        )

    def test_a_class_says_what_it_requires_and_the_defaults(self) -> None:
        found = {each.key: each for each in defaults(Whole)}
        self.assertTrue(found["region"].required)
        self.assertEqual(found["region"].text, "")
        self.assertEqual((found["path"].required, found["path"].text), (False, '"/a b"'))
        self.assertEqual(found["inner.name"].text, '"x"')
