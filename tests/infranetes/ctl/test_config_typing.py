# SPDX-License-Identifier: Apache-2.0
"""Each wrong configuration is blamed once, on its line and key, in words that say what to do."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs
from twisted.trial.unittest import SynchronousTestCase

from infranetes.config import Config
from infranetes.ctl.session import USAGE
from infranetes.pods.node.handler_config import HandlerConfig
from infranetes.providers import registry
from infranetes_common import config
from infranetes_common.errors import ConfigError
from tests.infranetes.ctl.test_config_files import said

P = 'provider = "simulated"\n'
QUOTE = "not TOML: the line ends within a text, whose closing quote is missing"
LIST = "its list is not closed: a ], or a comma or quote before it, is missing"
TWICE = "is given a second time, or is both a value and a table"
CHARACTER = "not TOML: the character"
Row = tuple[str | bytes, int, str]


class TypingTests(SynchronousTestCase):
    def check(self, rows: Sequence[Row]) -> None:
        file = Path(self.mktemp())
        for text, line, words in rows:
            file.write_bytes(text if isinstance(text, bytes) else text.encode())
            status, out = said("check", str(file))
            self.assertEqual(status, USAGE, text)
            found = out.replace(f"{file}:", "", 1).splitlines()
            self.assertEqual(len(found), 1, out)
            self.assertTrue(found[0].startswith(f"{line}: {words}"), f"{text!r}: {found[0]}")

    def test_what_is_not_closed_is_blamed_where_it_begins(self) -> None:
        self.check(
            [
                ('[images]\npinned = ["a",\n  "b"\n[log]\n', 2, f"not TOML: pinned: {LIST}"),
                ('[images]\npinned = ["a, "b"]\n', 2, f"not TOML: pinned: {LIST}"),
                ('[images]\n# the\n\npinned = [\n "a"\n "b"\n]\nx = 1\n', 4, f"not TOML: pinned: {LIST}"),
                ('[images]\npinned = [\n "a",\n "b,\n]\n', 4, f"{QUOTE}: pinned"),
                ('[images]\npinned = [\n "a",\n', 2, f"not TOML: pinned: {LIST}"),
                ('[images]\npinned = [\n "a",\n[log]\n', 2, f"not TOML: pinned: {LIST}"),
                ('[images]\npinned = [\n "a",\n b,\n]\n', 4, "not TOML: pinned: not a value: a string"),
                ('ca = """/x\ny\n', 1, f"{QUOTE}: ca"),
                ("ca = '/x\"\n", 1, f"{QUOTE}: ca"),
                ('provider = "qemu', 1, f"{QUOTE}: provider"),
                ('log = {level = "info"\n[times]\n', 1, "not TOML: log: its table is not closed"),
                (
                    'log = {level = "info",\n format = "text"}',
                    1,
                    "not TOML: log: a table in { } stands",
                ),
                ('[log\nlevel = "info"\n', 1, "not TOML: the name of a table ends with as many ] as"),
                ("[[pool.sizes]\ncount = 1\n", 1, "not TOML: the name of a table ends with as many ] as"),
            ]
        )

    def test_what_is_no_statement_says_what_one_is(self) -> None:
        statement, behind = (
            "not TOML: a line is KEY = VALUE",
            "something stands behind it",
        )
        self.check(
            [
                ('provider: "qemu"\n', 1, "not TOML: provider: = and a value are missing behind it"),
                ('{"provider": "qemu"}\n', 1, statement),
                ("// a comment\n", 1, statement),
                (f"{P}= 5\n", 2, statement),
                (f"{P[:-1]};\n", 1, f"not TOML: provider: {behind}"),
                (f'{P[:-1]} log.level = "info"\n', 1, f"not TOML: provider: {behind}"),
                ("parallel_agents = 064\n", 1, "not TOML: parallel_agents: a number does not begin with 0"),
                ('ca = "C:\\Users"\n', 1, "not TOML: ca: a \\ is written \\\\ in a text"),
                ("[control]\nenter = yes\n", 2, "not TOML: enter: not a value: a string stands in quotes"),
                (
                    f"{P}[providers.simulated]\n[providers.simulated]\n",
                    3,
                    f"not TOML: [providers.simulated] {TWICE}",
                ),
                (f"{P}[handlers.a]\n[handlers.a]\n", 3, f"not TOML: [handlers.a] {TWICE}"),
                (f"{P}[provider.qemu]\n", 2, f"not TOML: [provider.qemu] {TWICE}"),
                (
                    P + 'log = {level = "info", level = "warn"}\n',
                    2,
                    "not TOML: log: a key in it is given",
                ),
            ]
        )

    def test_a_character_that_does_not_belong_there_is_named(self) -> None:
        self.check(
            [
                (
                    "provider = \u201cqemu\u201d\n",
                    1,
                    "not TOML: the character U+201C (LEFT DOUBLE QUOTATION MARK)",
                ),
                (
                    'provider\u00a0= "qemu"\n',
                    1,
                    f"{CHARACTER} U+00A0 (NO-BREAK SPACE) can't stand",
                ),
                (
                    f'{P}\ufefflog.level = "info"\n',
                    2,
                    f"{CHARACTER} U+FEFF (ZERO WIDTH NO-BREAK",
                ),
                (f"{P}\0\n", 2, f"{CHARACTER} U+0000 can't stand here"),
                (
                    P.replace("\n", "\r") * 2,
                    1,
                    f"{CHARACTER} U+000D can't stand here: lines end",
                ),
                (P.encode("utf-16"), 1, "line 1: not UTF-8 text"),
                (f"{P}# caf\u00e9\n".encode("latin-1"), 2, "line 2: not UTF-8 text"),
                (b'\xef\xbb\xbfprovidr = "qemu"\n', 1, "providr: not known; did you mean provider?"),
                (
                    f'{P}[log]\nlevel = "loud"\n'.replace("\n", "\r\n"),
                    3,
                    "log.level: 'loud' is none of debug",
                ),
            ]
        )

    def test_a_key_in_the_wrong_place_says_the_right_one(self) -> None:
        self.check(
            [
                (f"{P}[log]\nlaunch = 5.0\n", 3, "log.launch: not known; did you mean times.launch?"),
                (
                    f'{P}[times]\ncluster = "x"\n',
                    3,
                    "times.cluster: not known; did you mean cluster, above the first",
                ),
                (
                    '[providers.qemu]\nlevel = "info"\n',
                    2,
                    "providers.qemu.level: not known; did you mean log.level?",
                ),
                (
                    f'{P}network = "vpc"\n',
                    2,
                    "network: not known; did you mean handlers.NAME.network or kubernetes.network or ",
                ),
                (
                    f'{P}pod_cidr = "10.0.0.0/16"\n',
                    2,
                    "pod_cidr: not known; did you mean overlay.pod_cidr or providers.qemu",
                ),
                (f"{P}[handler.gpu]\n", 2, "handler: not known; did you mean handlers?"),
                (
                    "[provider.qemu]\n",
                    1,
                    "provider: a string is expected, not a table; did you mean the table providers?",
                ),
                (
                    f"{P}[[handlers]]\n",
                    2,
                    "handlers: a table is expected, not a list: its name stands in [ ], not",
                ),
                (
                    f"{P}[pool.sizes]\ncount = 1\n",
                    2,
                    "pool.sizes: a list is expected, not a table: its name stands in [[",
                ),
            ]
        )

    def test_a_key_that_is_misspelt_is_not_missing_too(self) -> None:
        self.check(
            [
                (f"{P}[[pool.sizes]]\ncoutn = 2\n", 3, "pool.sizes.1.coutn: not known; did you mean count?"),
                (
                    'provider = "aws"\n[providers.aws]\nregon = "eu-west-1"\nimage = "ami-12345678"\n',
                    3,
                    "providers.aws.regon: not known; did you mean region?",
                ),
                (
                    f"{P}[handlers.x.annotations]\nalow = []\n",
                    3,
                    "handlers.x.annotations.alow: not known; did you mean allow?",
                ),
            ]
        )

    def test_values_say_what_is_expected(self) -> None:
        name = "a RuntimeClass's handler has up to 63 of a-z, 0-9 and -"
        self.check(
            [
                (
                    f'{P}[times]\nlaunch = "10m"\n',
                    3,
                    "times.launch: a number is expected, not a string: without quotes",
                ),
                (
                    f'{P}[volumes]\nmax_bytes = "256M"\n',
                    3,
                    'volumes.max_bytes: a size, such as "512MiB" is expected',
                ),
                (f"{P}[overlay]\nport = 70000\n", 3, "overlay.port: 70000 is not <= 65535"),
                (f"{P}[streaming]\nport = -1\n", 3, "streaming.port: -1 is not 0 to 65535"),
                (
                    f'{P}[metrics]\nlisten = "::1:9475"\n',
                    3,
                    "metrics.listen: '::1:9475' is no address",
                ),
                (f'{P}[streaming]\nhost = "::1"\n', 3, "streaming.host: '::1' is not an IPv4 address"),
                (
                    '[providers.qemu]\npod_cidr = "10.88.0.1/16"\n',
                    2,
                    "providers.qemu.pod_cidr: pod CIDR '10.88.0.1/16': 10.88.0.1/16 has host bits set; did "
                    "you mean 10.88.0.0/16?",
                ),
                (f"{P}[providers]\nmtu = 5\n", 3, "providers.mtu: a table is expected, not an integer"),
                ('[providers.qemu]\ncpu = "a; b"\n', 2, "providers.qemu.cpu: 'a; b' is not of the form ["),
                (f'{P}[metrics]\nlisten = "[::1%lo]:80"\n', 3, "metrics.listen: '[::1%lo]:80' is no address"),
                (f'{P}node = "a\\nb"\n', 2, "node: 1 to 63 printable characters are needed"),
                ('provider = "QEMU"\n', 1, "provider: no provider is called 'QEMU'; did you mean qemu?"),
                (f'{P}runtime_handlers = ["A B"]\n', 2, f"runtime_handlers: 'A B': {name}"),
                (f'{P}[handlers.""]\n', 2, f"handlers: '': {name}"),
                (f'{P}[handlers."a b"]\n', 2, f"handlers.a b: {name}"),
                (
                    f'{P}[handlers."a b"]\nprovidr = "x"\n',
                    3,
                    "handlers.a b.providr: not known; did you mean provider?",
                ),
                (
                    f'{P}[handlers.x.annotations.set]\n"infranetes.io/cpu" = "1"\n"infranetes.io/s" = "x"\n',
                    4,
                    "handlers.x.annotations.set.infranetes.io/s: annotation infranetes.io/s is not known",
                ),
            ]
        )


class WordsTests(SynchronousTestCase):
    """Whatever a key is given, what is said is for who wrote it, and never Python's or a library's."""

    NEEDED: Mapping[str, Mapping[str, object]] = {
        "aws": {"region": "eu-west-1", "image": "ami-12345678"},
        "gcp": {
            "project": "p-123456",
            "zones": ["europe-west1-b"],
            "image": "projects/p-123456/global/images/x",
        },
        "libcloud": {"driver": "digitalocean", "credentials_file": "/x", "image": "i", "locations": ["l"]},
        "openstack": {"cloud": "c", "image": "i", "network": "n"},
        "azure": {
            **dict.fromkeys(("resource_group", "location", "subnet"), "x"),
            **{"subscription": "00000000-0000-0000-0000-000000000000", "image": "gallery/image"},
        },
        "vsphere": {
            **dict.fromkeys(("host", "username", "datacenter", "folder", "image"), "x"),
            **{"password_file": "/x", "resource_pools": ["x"], "networks": ["x"]},
        },
    }
    GIVEN: Sequence[object] = ("", "x y", "%", -1, 0, 10**9, 1.5, -0.5, True, [], [""], {"a": 1}, [{}])
    STRANGE = re.compile(r"'\w+' must be|<class|range\(|regex|Length of|object at|(\b\w+): \1: ")

    def test_no_message_is_pythons(self) -> None:
        seen = 0
        classes = {name: registry.settings_class(name) for name in registry.names()}
        for name, cls in {"": Config, "handlers.x": HandlerConfig, **classes}.items():
            assert cls is not None
            needed = self.NEEDED.get(name, {})
            for field in attrs.fields(attrs.resolve_types(cls)):
                inner = field.type if isinstance(field.type, type) and attrs.has(field.type) else None
                for value in self.GIVEN:
                    tables: list[object] = [value]
                    if inner is not None:
                        tables = [{each.alias: value} for each in attrs.fields(attrs.resolve_types(inner))]
                    for table in tables:
                        try:
                            config.structure({**needed, field.alias: table}, cls, source="F", prefix=name)
                        except ConfigError as error:
                            seen += 1
                            self.assertNotRegex(str(error), self.STRANGE)
        self.assertGreater(seen, 2000)
