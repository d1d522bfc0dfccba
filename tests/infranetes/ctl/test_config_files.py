# SPDX-License-Identifier: Apache-2.0
"""infranetes-ctl config check and config default."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path

import attrs
from twisted.trial.unittest import SynchronousTestCase

from infranetes.config import Config, load
from infranetes.ctl.__main__ import main
from infranetes.ctl.config_files import reference
from infranetes.ctl.session import DONE, USAGE
from infranetes.pods.node.handler_config import HandlerConfig
from infranetes.providers import registry
from infranetes_common.config_text import defaults


def said(*arguments: str) -> tuple[int, str]:
    """Return the exit status and what is printed."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = main(["config", *arguments])
    return status, out.getvalue()


class WholeTests(SynchronousTestCase):
    """Nothing is called right that was not looked at."""

    def said_of(self, content: bytes) -> list[str]:
        file = Path(self.mktemp())
        file.write_bytes(content)
        _, out = said("check", str(file))
        return [line.replace(f"{file}", "F") for line in out.splitlines()]

    def test_tables_of_providers_that_make_no_vms_are_read(self) -> None:
        self.assertEqual(
            self.said_of(b'provider = "simulated"\n[providers.qmeu]\n[providers.qemu]\nuser = 5\n'),
            [
                "F:2: providers.qmeu: no provider is called 'qmeu'; did you mean qemu?",
                "F:4: providers.qemu.user: a string is expected, not an integer",
            ],
        )

    def test_all_files_that_are_named_are_read(self) -> None:
        ca = Path(self.mktemp()).absolute()
        ca.write_text("no PEM")
        given = f'provider = "simulated"\nca = "{ca}"\nkubernetes.kubeconfig = "/nope"\n'
        of_ca, of_kubeconfig = self.said_of(given.encode())
        self.assertTrue(of_ca.startswith(f"F:2: ca: the node's CA key {ca} "), of_ca)
        self.assertEqual(
            of_kubeconfig, "F:3: kubernetes.kubeconfig: /nope can't be read: No such file or directory"
        )

    def test_a_file_as_an_editor_of_windows_writes_it_is_read(self) -> None:
        (words,) = self.said_of(b'\xef\xbb\xbfprovider = "simulated"\r\n')
        self.assertEqual(words, "nothing is wrong with F")

    def test_a_key_or_value_that_is_nearly_right_is_told_what_is_right(self) -> None:
        self.assertEqual(
            self.said_of(b'level = "info"\n'), ["F:1: level: not known; did you mean log.level?"]
        )
        for text in (b"provider = qemu\n", b"provider = True\n", b"provider =\n"):
            (words,) = self.said_of(text)
            self.assertTrue(words.startswith("F:1: not TOML: provider: not a value: a string stands"), words)


class BlameTests(SynchronousTestCase):
    """Each fault names its line and its key, in words of who wrote the file."""

    def said_of(self, text: str) -> list[str]:
        file = Path(self.mktemp())
        file.write_text(text)
        status, out = said("check", str(file))
        self.assertEqual(status, USAGE)
        return [line.removeprefix(f"{file}:") for line in out.splitlines()]

    def test_each_is_blamed_on_its_line_and_key(self) -> None:
        for text, fault in (
            (
                'provider="qemu"\n[handlers.gpu]\nprovider="nosuch"',
                "3: handlers.gpu.provider: no provider is",
            ),
            ("[qemu]\nmtu = 1400", "1: qemu: not known; did you mean providers.qemu?"),
            (
                '[providers.qemu]\naccelerator="x"',
                "2: providers.qemu.accelerator: 'x' is none of auto, kvm, tcg",
            ),
            (
                '[providers.qemu]\npod_cidr="10.0.0.0/99"',
                "2: providers.qemu.pod_cidr: pod CIDR '10.0.0.0/99'",
            ),
            ("[times]\nlaunch = -1", "2: times.launch: -1.0 is not > 0"),
            ('cluster = "a"\ncluster = "b"', "2: not TOML: cluster is given a second time"),
            ("[log]\n[log]", "2: not TOML: [log] is given a second time"),
            ("a = 1\na.b = 2", "2: not TOML: a.b is given a second time, or is both a value and a table"),
            (
                'provider = "qemu\n',
                "1: not TOML: the line ends within a text, whose closing quote is missing",
            ),
            ('ca = "/no/such"', "1: ca: /no/such can't be read: No such file"),
            ('[kubernetes]\nkubeconfig = "/no/such"', "2: kubernetes.kubeconfig: /no/such can't be read"),
        ):
            (found,) = self.said_of(text)
            self.assertTrue(found.startswith(fault), found)


class KubeconfigTests(SynchronousTestCase):
    def test_a_kubeconfig_that_can_not_be_used_is_wrong(self) -> None:
        """The daemon would start with it, and VMs would lack Services and policies."""
        file, kubeconfig = Path(self.mktemp()), Path(self.mktemp()).absolute()
        file.write_text(f'provider = "simulated"\nkubernetes.kubeconfig = "{kubeconfig}"\n')
        for content, words in ((None, "can't be read: No such file"), ("[]", "has to be a mapping")):
            if content is not None:
                kubeconfig.write_text(content)
            status, out = said("check", str(file))
            self.assertEqual(status, USAGE)
            self.assertIn("kubernetes.kubeconfig: ", out)
            self.assertIn(words, out)


class DefaultTests(SynchronousTestCase):
    def keys(self) -> set[str]:
        status, text = said("default", "--json")
        self.assertEqual(status, DONE)
        return {each["key"] for each in json.loads(text)["keys"]}

    def test_as_printed_it_changes_nothing_and_neither_do_its_keys(self) -> None:
        status, text = said("default")
        self.assertEqual(status, DONE)
        file = Path(self.mktemp())
        file.write_text(text)
        self.assertEqual(load(str(file), {}), Config())
        uncommented = re.sub(r"^#(?=[\[a-z])", "", text, flags=re.M)
        given = re.sub(r"^[a-z_]+ =\n", "", uncommented, flags=re.M)  # keys without a default
        file.write_text(given)
        found = load(str(file), {})
        self.assertEqual(found.handlers, {"example": HandlerConfig()})
        self.assertEqual(attrs.evolve(found, handlers={}, providers={}), Config())
        for name, table in found.providers.items():
            cls = registry.settings_class(name)
            assert cls is not None
            known = {each.key: each.value for each in defaults(cls)}
            self.assertLessEqual(table.keys(), known.keys())

    def test_every_key_of_every_class_is_there(self) -> None:
        expected = {each.key for each in defaults(Config)} - {"providers", "handlers"}
        for name in registry.names():
            cls = registry.settings_class(name)
            assert cls is not None, name
            expected |= {f"providers.{name}.{each.key}" for each in defaults(cls)}
        self.assertEqual({key for key in self.keys() if not key.startswith("handlers.")}, expected)
        self.assertIn("handlers.example.annotations.set", self.keys())

    def test_every_key_says_what_it_means(self) -> None:
        for table in reference():
            for key in table.keys:
                self.assertTrue(key.words, f"{table.name}.{key.name}")
                self.assertNotRegex(key.words, r"\]\(|`")


class CheckTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.file = Path(self.mktemp()).absolute()

    def drop_in(self, name: str, text: str) -> Path:
        path = Path(f"{self.file}.d") / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    def check(self, text: str, *lines: str) -> None:
        """Check that a file with this text has exactly the faults that begin like these lines."""
        self.file.write_text(text)
        status, words = said("check", str(self.file))
        self.assertEqual(status, USAGE, words)
        found = words.splitlines()
        self.assertEqual(len(found), len(lines), words)
        for line, beginning in zip(found, lines, strict=True):
            self.assertTrue(line.startswith(beginning), f"{line!r} does not begin with {beginning!r}")

    def test_a_file_that_is_right(self) -> None:
        self.file.write_text('provider = "simulated"\n')
        drop_in = self.drop_in("a.toml", 'log.level = "warn"\n')
        self.assertEqual(
            said("check", str(self.file)), (DONE, f"nothing is wrong with {self.file}, {drop_in}\n")
        )
        files = [str(self.file), str(drop_in)]
        status, text = said("check", "--json", "--config", str(self.file))
        self.assertEqual(
            (status, json.loads(text)),
            (DONE, {"files": files, "faults": [], "warnings": [], "not_looked_at": []}),
        )

    def test_every_fault_of_every_file_has_its_line(self) -> None:
        drop_in = self.drop_in("a.toml", "[times]\nlaunch = -1\n[providers.simulated]\nboots = 1\n")
        self.check(
            'provider = "simulated"\nsockett = 1\n[log]\nlevel = "loud"\n[[pool.sizes]]\ncount = 1\n'
            "[[pool.sizes]]\ncount = -1\n",
            f"{self.file}:2: sockett: not known; did you mean socket?",
            f"{self.file}:4: log.level: ",
            f"{self.file}:8: pool.sizes.2.count: ",
            f"{drop_in}:2: times.launch: ",
            f"{drop_in}:4: providers.simulated.boots: not known",
        )

    def test_what_is_missing_is_where_its_table_is(self) -> None:
        self.check(
            'provider = "gcp"\n\n[providers.gcp]\nproject = "p-123456"\n',
            f"{self.file}:3: providers.gcp.zones: missing",
            f"{self.file}:3: providers.gcp.image: missing",
        )

    def test_what_is_no_toml(self) -> None:
        drop_in = self.drop_in("a.toml", "socket = 5\nx = \n")
        other = self.drop_in("b.toml", "")
        other.write_bytes(b"#\n\xff\n")
        self.check(
            "a = \n",
            f"{self.file}:1: not TOML",
            f"{drop_in}:2: not TOML",
            f"{other}:2: line 2: not UTF-8",
        )

    def test_a_file_that_is_no_toml_hides_no_fault_of_another(self) -> None:
        broken = self.drop_in("a.toml", "x = \n")
        drop_in = self.drop_in("b.toml", "\n[times]\nlaunch = -1\n")
        self.check(
            'provider = "gcp"\nsockett = 1\n[providers.gcp]\nprojekt = "p"\n',
            f"{self.file}:2: sockett: not known",
            f"{self.file}:4: providers.gcp.projekt: not known",
            f"{broken}:1: not TOML",
            f"{drop_in}:3: times.launch: ",
        )

    def test_what_may_be_in_a_file_that_is_no_toml_is_not_missing(self) -> None:
        drop_in = self.drop_in("a.toml", '[providers.gcp]\nzones = ["a"]\nimage = \n')
        self.check('provider = "gcp"\n[providers.gcp]\nproject = "p-123456"\n', f"{drop_in}:3: not TOML")

    def test_a_file_that_is_not_there(self) -> None:
        status, words = said("check", str(self.file))
        self.assertEqual((status, words), (USAGE, f"{self.file}: can't be read: No such file or directory\n"))

    def test_what_keys_come_to_together(self) -> None:
        self.check(
            'provider = "simulated"\ndelegate.socket = "x"\nimgprovider = "nix"\n',
            f"{self.file}:2: delegate.socket: ",
            f"{self.file}:3: imgprovider: ",
        )
        self.check('provider = "nobody"\n', f"{self.file}:1: provider: no provider is called 'nobody'")
        self.check(
            'provider = "simulated"\n[handlers.x]\nnetwork = "overlay"\n',
            f"{self.file}:3: handlers.x.network: provider 'simulated' can't give",
        )
        self.check('provider = "simulated"\n[images]\n\npinned = ["::"]\n', f"{self.file}:4: images.pinned: ")

    def test_each_handlers_wrong_provider_is_told(self) -> None:
        self.check(
            'provider = "simulated"\n[handlers.gpu]\nprovider = "nobody"\n[handlers.cpu]\nprovider = "nix"\n',
            f"{self.file}:3: handlers.gpu.provider: no provider is called 'nobody'",
            f"{self.file}:5: handlers.cpu.provider: no provider is called 'nix'",
        )

    def test_a_secret_that_is_wrong_is_not_shown(self) -> None:
        self.file.write_text(
            'provider = "aws"\n[providers.aws]\nregion = "eu-west-1"\nimage = "ami-12345678"\n'
            'secret_key = "hunter2"\n'
        )
        status, text = said("check", "--json", str(self.file))
        self.assertEqual(status, USAGE)
        (fault,) = json.loads(text)["faults"]
        self.assertEqual((fault["file"], fault["line"]), (str(self.file), 5))
        self.assertEqual(fault["key"], "providers.aws.secret_key")
        self.assertNotIn("hunter2", text)
