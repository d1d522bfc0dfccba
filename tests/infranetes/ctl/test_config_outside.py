# SPDX-License-Identifier: Apache-2.0
"""`config check` looks at what files name outside of them, or says what it did not look at, and why."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import attrs
from twisted.trial.unittest import SynchronousTestCase

from infranetes.config import Config
from infranetes.ctl.session import DONE, USAGE
from infranetes.providers import registry
from infranetes.providers.qemu.host import kvm
from infranetes_common.config_outside import _NAMES
from tests.harness.needs import needs_root
from tests.infranetes.ctl.test_config_files import said

KUBECONFIG = """\
current-context: c
contexts: [{name: c, context: {cluster: c, user: u}}]
clusters: [{name: c, cluster: {server: "https://10.0.0.1:6443"}}]
users: [{name: u, user: %s}]
"""
CLOUDS = {
    "aws": 'region = "eu-west-1"\nimage = "ami-12345678"\n',
    "gcp": 'project = "p-123456"\nzones = ["europe-west1-b"]\nimage = "projects/p-123456/global/images/x"\n',
}


class OutsideTestCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.directory = Path(tempfile.mkdtemp())  # sockets need a short path, and others a way to it
        self.directory.chmod(0o755)
        self.addCleanup(shutil.rmtree, self.directory)
        self.file = self.directory / "f.toml"

    def checked(self, *lines: str, provider: str = "simulated") -> tuple[int, list[str]]:
        """Return the exit status and the lines of a check of a file with these lines."""
        self.file.write_text("\n".join([f'provider = "{provider}"', *lines, ""]))
        status, out = said("check", str(self.file))
        return status, [line.replace(str(self.file), "F") for line in out.splitlines()]

    def put(self, name: str, text: str = "", mode: int = 0o600) -> Path:
        path = self.directory / name
        path.write_text(text)
        path.chmod(mode)
        return path


class FaultTests(OutsideTestCase):
    def test_what_is_named_and_not_there_is_a_fault(self) -> None:
        for key in (
            "images.policy",
            "images.registries_conf",
            "images.auth_file",
            "images.skopeo",
            "tracing.headers_file",
            "ca",
            "kubernetes.kubeconfig",
        ):
            status, (words,) = self.checked(f'{key} = "/no/such"')
            self.assertEqual(status, USAGE)
            self.assertRegex(words, f"^F:2: {key}: .*/no/such (can't be read: No such file|is missing)")

    def test_what_is_something_else_than_it_has_to_be_is_a_fault(self) -> None:
        other, dangling = self.put("x", "{", 0o644), self.directory / "link"
        dangling.symlink_to("/no/such")
        for line, words in (
            (f'images.policy = "{other}"', f"images.policy: {other} is no JSON: "),
            (f'images.registries_conf = "{other}"', f"images.registries_conf: {other} is no TOML: "),
            ('images.auth_file = "/etc"', "images.auth_file: /etc is a directory: a file is expected"),
            (f'delegate.socket = "{other}"', f"delegate.socket: {other} is no socket"),
            (f'state_dir = "{other}/state"', f"state_dir: {other} is no directory"),
            (f'run_dir = "{dangling}"', f"run_dir: {dangling} can't be read: No such file"),
            (f'apparmor_dir = "{other}"', f"apparmor_dir: {other} is no directory"),
            ('socket = "/etc"', "socket: /etc is there and is no socket: move it away"),
            ('images.skopeo = ""', "images.skopeo: it can't be empty: give it a value, or leave it out"),
            ('overlay.device = "lo"', "overlay.device: this machine has a network device lo already"),
            ('streaming.host = "203.0.113.1"', "streaming.host: 203.0.113.1 is no address of this machine"),
            ('metrics.listen = "203.0.113.1:1"', "metrics.listen: 203.0.113.1 is no address of this machine"),
        ):
            status, (found,) = self.checked(line)
            self.assertEqual(status, USAGE, line)
            self.assertTrue(found.startswith(f"F:2: {words}"), found)

    def test_files_of_the_metrics_are_read_as_the_daemon_reads_them(self) -> None:
        listen = 'metrics.listen = "127.0.0.1:0"'
        short = self.put("token", "short")
        status, (words,) = self.checked(listen, f'metrics.token_file = "{short}"')
        self.assertEqual(status, USAGE)
        self.assertTrue(words.startswith(f"F:3: metrics.token_file: {short} has to hold one word"), words)
        tls = f'metrics.certificate_file = "{short}"', f'metrics.key_file = "{self.put("key", "x", 0o644)}"'
        (words,) = self.checked(listen, *tls)[1]
        self.assertTrue(words.startswith("F:4: metrics.key_file: "), words)
        self.assertIn("may be read by others", words)

    def test_files_and_programs_of_providers_are_looked_at(self) -> None:
        for provider, keys in (
            ("aws", ["prices_file"]),
            ("gcp", ["key_file", "prices_file"]),
        ):
            lines = [f'{key} = "/no/such"' for key in keys]
            status, found = self.checked(
                f"[providers.{provider}]", *lines, *CLOUDS[provider].splitlines(), provider=provider
            )
            self.assertEqual(status, USAGE)
            wrong = [re.match(rf"F:\d: providers.{provider}.(\w+): .*/no/such", each) for each in found]
            self.assertEqual([each[1] for each in wrong if each], keys, found)
        self.patch(kvm, "KVM", "/no/such/kvm")
        for key in ("qemu", "qemu_img", "user"):
            status, (words,) = self.checked("[providers.qemu]", f'{key} = "no-such"', provider="qemu")
            self.assertEqual(status, USAGE)
            self.assertRegex(words, rf"^F:3: providers.qemu.{key}: .*no-such")


class WarningTests(OutsideTestCase):
    def test_what_the_daemon_waits_for_is_warned_of(self) -> None:
        path = self.directory / "cri.sock"
        status, (words, summary) = self.checked(f'delegate.socket = "unix://{path}"')
        self.assertEqual((status, summary), (DONE, "the daemon starts with F; see the warnings"))
        self.assertTrue(words.startswith(f"F:2: delegate.socket: warning: nobody listens on '{path}' now"))
        with socket.socket(socket.AF_UNIX) as runtime:
            runtime.bind(str(path))
            runtime.listen()
            _, (words, _) = self.checked(f'socket = "{path}"')
            self.assertIn("socket: not looked at: another program, or the daemon itself, listens on", words)
            self.assertEqual(self.checked(f'delegate.socket = "{path}"'), (DONE, ["nothing is wrong with F"]))
        self.patch(kvm, "KVM", "/no/such/kvm")
        _, (words, _) = self.checked("[providers.qemu]", f'image_dir = "{self.directory}"', provider="qemu")
        self.assertIn("image_dir: warning: there is no guest image in", words)


class KvmTests(OutsideTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.kvm = self.put("kvm")
        self.patch(kvm, "KVM", str(self.kvm))

    def of(self, *lines: str) -> tuple[int, list[str]]:
        return self.checked("[providers.qemu]", *lines, provider="qemu")

    def test_a_device_that_is_closed_to_qemu_is_told_with_what_opens_it(self) -> None:
        for lines, place, status in (
            ([], "F:2: providers.qemu.accelerator: warning: ", DONE),
            (['accelerator = "auto"'], "F:3: providers.qemu.accelerator: warning: ", DONE),
            (['accelerator = "kvm"'], "F:3: providers.qemu.accelerator: ", USAGE),
        ):
            code, found = self.of(*lines)
            self.assertEqual(code, status)
            self.assertTrue(found[0].startswith(f"{place}VMs can't use KVM: {self.kvm} belongs to "), found)
            self.assertIn(f"chgrp kvm {self.kvm} && chmod 0660 {self.kvm}", found[0])
            self.assertNotIn("nothing is wrong", found[-1])
        self.assertEqual(self.of('accelerator = "tcg"')[1], ["nothing is wrong with F"])

    def test_where_another_provider_makes_the_vms_nobody_asks_for_it(self) -> None:
        self.assertEqual(self.checked()[1], ["nothing is wrong with F"])

    def test_of_a_handlers_provider_it_is_told_where_the_handler_names_it(self) -> None:
        _, found = self.checked("[handlers.vm]", 'provider = "qemu"')
        self.assertTrue(found[0].startswith("F:3: providers.qemu.accelerator: warning: "), found)

    def test_an_open_device_is_not_proof(self) -> None:
        self.kvm.chmod(0o666)
        self.assertEqual(self.of()[1], ["nothing is wrong with F"])
        _, (words, _) = self.of('accelerator = "auto"')
        self.assertIn("not looked at: no guest was run", words)

    def test_one_that_is_not_there_is_a_fault_where_it_is_wanted(self) -> None:
        self.kvm.unlink()
        self.assertEqual(self.of('accelerator = "auto"'), (DONE, ["nothing is wrong with F"]))
        status, (words,) = self.of('accelerator = "kvm"')
        self.assertEqual(status, USAGE)
        self.assertIn(f"there is no {self.kvm}", words)


class NotLookedAtTests(OutsideTestCase):
    def test_what_was_not_asked_or_run_is_told(self) -> None:
        of_token = self.put("t", KUBECONFIG % "{token: a}")
        of_plugin = self.put("p", KUBECONFIG % f"{{exec: {{apiVersion: {API}, command: {sys.executable}}}}}")
        for line, *words in (
            (f'kubernetes.kubeconfig = "{of_token}"', "the API server https://10.0.0.1:6443 was not asked"),
            (f'kubernetes.kubeconfig = "{of_plugin}"', f"the command {sys.executable}, which", "the API"),
            ('tracing.endpoint = "http://127.0.0.1:1/v1/traces"', "no collector was asked"),
            ('images.preload = ["registry.example/a:1"]', "no registry was asked"),
            ('images.insecure_registries = ["registry.example"]', "no registry was asked"),
            ("[providers.qemu]", "no pod has its VM from this provider"),
        ):
            status, (*found, summary) = self.checked(line)
            self.assertEqual(status, DONE)
            key = line.strip("[]").partition(" ")[0]
            for one, each in zip(found, words, strict=True):
                self.assertTrue(one.startswith(f"F:2: {key}: not looked at: {each}"), found)
            self.assertEqual(summary, "the rest of F was looked at, and no fault was found")
        lines = f'kubernetes.kubeconfig = "{of_token}"', 'kubernetes.master_ip = "10.9.8.7"'
        self.assertIn("the API server https://10.9.8.7:6443 was", self.checked(*lines)[1][0])

    def test_clouds_are_not_asked(self) -> None:
        for provider, table in CLOUDS.items():
            _, found = self.checked(f"[providers.{provider}]", *table.splitlines(), provider=provider)
            self.assertTrue(
                found[0].startswith(f"F:2: providers.{provider}: not looked at: the cloud"), found
            )

    def test_what_is_on_another_machine_is_not_looked_for_on_this_one(self) -> None:
        lines = ['ca = "/no/ca"', 'images.skopeo = "no-such"', "[metrics]", 'listen = "203.0.113.1:1"']
        lines += ["[providers.aws]", 'prices_file = "/no/prices"', *CLOUDS["aws"].splitlines()]
        self.file.write_text("\n".join(['provider = "aws"', *lines]))
        status, out = said("check", "--elsewhere", str(self.file))
        self.assertEqual(status, DONE, out)
        keys = ["ca", "images.skopeo", "metrics", "providers.aws", "providers.aws.prices_file"]
        words = "not looked at: it is on the machine that the file is for"
        self.assertEqual(
            [line.removeprefix(f"{self.file}:") for line in out.splitlines()[:-1]],
            [f"{line}: {key}: {words}" for line, key in zip((2, 3, 4, 6, 7), keys, strict=True)],
        )
        self.file.write_text('provider = "aws"\nca = "ca"\n[providers.aws]\nregion = "x"\n')
        status, out = said("check", "--elsewhere", str(self.file))
        self.assertEqual(status, USAGE)

    def test_a_program_reads_the_same(self) -> None:
        self.file.write_text('provider = "simulated"\ntracing.endpoint = "http://127.0.0.1:1/v1"\n')
        status, text = said("check", "--json", str(self.file))
        unseen = {
            "file": str(self.file),
            "line": 2,
            "key": "tracing.endpoint",
            "words": "no collector was asked",
        }
        self.assertEqual(status, DONE)
        self.assertEqual(
            json.loads(text),
            {"files": [str(self.file)], "faults": [], "warnings": [], "not_looked_at": [unseen]},
        )

    def test_where_a_program_listens_it_may_be_the_daemon(self) -> None:
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            port = other.getsockname()[1]
            _, (words, _) = self.checked(f'metrics.listen = "127.0.0.1:{port}"')
        self.assertIn(
            f"listen: not looked at: another program, or the daemon itself, listens on port {port}", words
        )

    @needs_root
    def test_what_only_root_may_read_is_not_looked_at_by_others(self) -> None:
        closed = self.directory / "closed"
        closed.mkdir(mode=0o700)
        token = self.put("token", "x" * 20)
        named = self.put("k", KUBECONFIG % f"{{tokenFile: {token}}}", 0o644)
        runtime = self.directory / "cri.sock"
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(runtime))
        runtime.chmod(0o600)
        lines = [
            f'ca = "{closed}/ca"',
            f'images.policy = "{closed}/policy"',
            f'tracing.headers_file = "{closed}/headers"',
            f'kubernetes.kubeconfig = "{named}"',
            'metrics.listen = "127.0.0.1:0"',
            f'metrics.token_file = "{token}"',
            f'state_dir = "{closed}/a/b"',
            f'apparmor_dir = "{closed}"',
            f'socket = "{runtime}"',
        ]
        self.file.write_text("")
        os.chown(self.file, 65534, 65534)
        self.checked(*lines)  # imports what others may not be able to read
        os.seteuid(65534)
        self.addCleanup(os.seteuid, 0)
        status, (*found, _) = self.checked(*lines)
        self.assertEqual(status, DONE, found)
        told = [
            re.match(r"F:(\d+): .*: not looked at: .*: only root can look at it; check as root$", each)
            for each in found
        ]
        self.assertEqual(
            [each and each[1] for each in told], ["2", "3", "4", "5", "7", "8", "9", "10"], found
        )

    def test_what_a_plug_in_does_not_tell_is_not_looked_at(self) -> None:
        site = Path(self.mktemp()).absolute()
        meta = site / "a_cloud-1.0.dist-info"
        meta.mkdir(parents=True)
        (meta / "METADATA").write_text("Metadata-Version: 2.1\nName: a-cloud\nVersion: 1.0\n")
        points = meta / "entry_points.txt"
        points.write_text("[infranetes.providers]\nwhole = tests.infranetes.providers.test_registry:Whole\n")
        self.patch(sys, "path", [str(site), *sys.path])
        _, (words, _) = self.checked("[providers.whole]", 'file = "/no/such"', provider="whole")
        self.assertTrue(
            words.startswith("F:2: providers.whole: not looked at: its plug-in does not tell"), words
        )
        points.write_text("[infranetes.providers]\nwhole = no_such_module:create\n")
        status, (words,) = self.checked(provider="whole")
        self.assertEqual(status, USAGE)
        self.assertTrue(words.startswith("F:1: provider: 'whole' can't be loaded from no_such_module"), words)
        self.flushLoggedErrors(ModuleNotFoundError)


API = "client.authentication.k8s.io/v1"
# Keys that sound as if they named something of this machine, and name something of a cloud or nothing.
OTHERS = re.compile(
    r"providers\.(aws|azure|gcp|libcloud|openstack|vsphere)\..*(?<!_file)|images\.platform|pool\..*"
)
SOUND = re.compile(
    r"(^|_)(file|dir|socket|endpoint|conf|policy|kubeconfig|ca|command|device|devices|listen)$"
)


def fields(cls: type[attrs.AttrsInstance], prefix: str) -> Iterator[tuple[str, attrs.Attribute[object]]]:
    """Yield the dotted key and the field of each key of a table and of those in it."""
    attrs.resolve_types(cls)
    for field in attrs.fields(cls):
        if isinstance(field.type, type) and attrs.has(field.type):
            yield from fields(field.type, f"{prefix}{field.alias}.")
        else:
            yield f"{prefix}{field.alias}", field


class CompleteTests(SynchronousTestCase):
    """A key that is added later is not forgotten."""

    #: Keys that are looked at together, by `look_outside`.
    TOGETHER = frozenset(
        {f"metrics.{key}" for key in ("listen", "certificate_file", "key_file", "token_file")}
        | {"providers.openstack.clouds_file", "providers.libcloud.credentials_file", "kubernetes.kubeconfig"}
    )

    def test_every_key_that_names_something_of_this_machine_is_looked_at(self) -> None:
        tables = [(Config, "")]
        for name in registry.names():
            cls = registry.settings_class(name)
            assert cls is not None
            tables.append((cls, f"providers.{name}."))  # type: ignore[arg-type]
        seen = 0
        for cls, prefix in tables:
            for key, field in fields(cls, prefix):
                named = SOUND.search(field.name) or "Path" in str(field.type)
                if named and not OTHERS.fullmatch(key):
                    seen += 1
                    self.assertTrue(_NAMES in field.metadata or key in self.TOGETHER, key)
        self.assertGreater(seen, 25)
