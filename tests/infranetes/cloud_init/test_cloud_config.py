# SPDX-License-Identifier: Apache-2.0
"""What Infranetes adds to a pod's user-data."""

from __future__ import annotations

import base64
import shlex
import subprocess
from pathlib import Path

from twisted.internet.task import deferLater
from twisted.trial.unittest import SynchronousTestCase, TestCase

from infranetes.cloud_init.cloud_config import ENVIRONMENT, MAX_FILES, environment_file
from infranetes.cloud_init.configuration import configuration
from infranetes.cloud_init.document import GuestDocument, GuestVolume
from infranetes.machines.agentless.access import GuestFile
from infranetes_common.concurrency import deferred
from infranetes_common.errors import InvalidArgument
from infranetes_common.reactors import installed
from tests.infranetes.cloud_init.cases import HOST_KEY, NODE_KEY, added

reactor = installed()
ENVIRONMENTS = {
    "PLAIN": "a-b.c/d:e@f=g",
    "EMPTY": "",
    "SPACES": "a  b",
    "QUOTES": 'it\'s "so"',
    "SIGNS": "$HOME `date` \\ \\n !",
    "LINES": "one\ntwo\n",
    "UMLAUT": "ü",
}


class FilesTests(SynchronousTestCase):
    def test_files_are_written_with_their_content_and_permissions(self) -> None:
        held = {"/etc/tls/key": GuestFile(b"\0\xff", 0o400), "/etc/tls/empty": GuestFile(b"")}
        self.assertEqual(
            added(GuestDocument("s1", files=held))["write_files"],
            [
                {"path": "/etc/tls/empty", "permissions": "0644", "encoding": "b64", "content": ""},
                {"path": "/etc/tls/key", "permissions": "0400", "encoding": "b64", "content": "AP8="},
            ],
        )

    def test_what_is_too_large_in_sum_is_refused_and_the_largest_named(self) -> None:
        half = GuestFile(b"x" * (MAX_FILES // 2))
        configuration(GuestDocument("s1", files={"/a/b": half, "/a/c": half}))
        held = {"/a/b": half, "/a/large": GuestFile(half.content + b"x")}
        error = self.assertRaises(InvalidArgument, configuration, GuestDocument("s1", files=held))
        self.assertIn(f"/a/large with {MAX_FILES // 2 + 1}", str(error))

    def test_paths_of_any_language_are_kept(self) -> None:
        paths = ("/etc/a b/\u00fc", "/etc/'\"\\: #", "/etc/\U0001f600", f"/etc/{'x' * 200}")
        held = {path: GuestFile(b"") for path in paths}
        self.assertEqual([each["path"] for each in _written(GuestDocument("s1", files=held))], sorted(paths))
        script = _script(GuestDocument("s1", files=held, instance_id="root-7"))
        for path in paths:
            self.assertIn(f"put {shlex.quote(path)} 644", script)

    def test_paths_that_no_guest_has_are_refused(self) -> None:
        for path in ("etc/x", "/etc/../x", "/etc//x", "/etc/\n", "/etc/x/"):
            for document in (
                GuestDocument("s1", files={path: GuestFile(b"")}),
                GuestDocument("s1", volumes=(GuestVolume("v1", path),)),
            ):
                self.assertRaises(InvalidArgument, configuration, document)

    def test_the_environment_is_a_file_that_is_there_only_if_there_is_one(self) -> None:
        (file,) = _written(GuestDocument("s1", environment={"A": "b"}))
        self.assertEqual(file["path"], ENVIRONMENT)
        self.assertEqual(base64.b64decode(file["content"]), b"A=b\n")
        self.assertNotIn("write_files", added(GuestDocument("s1")))

    def test_a_file_of_the_pods_at_its_path_stays(self) -> None:
        held = {ENVIRONMENT: GuestFile(b"own")}
        (file,) = _written(GuestDocument("s1", files=held, environment={"A": "b"}))
        self.assertEqual(base64.b64decode(file["content"]), b"own")


class LargeTests(TestCase):
    @deferred
    async def test_as_much_as_is_allowed_keeps_nobody_waiting(self) -> None:
        held = {f"/a/{number}": GuestFile(b"x" * (MAX_FILES // 4)) for number in range(4)}
        for instance_id in ("", "root-7"):
            document = GuestDocument("s1", files=held, host_key=HOST_KEY, instance_id=instance_id)
            self.assertIsNotNone(await deferLater(reactor, 0, configuration, document))


class EnvironmentTests(SynchronousTestCase):
    def test_a_shell_that_sources_it_has_the_same_values(self) -> None:
        file = Path(self.mktemp())
        file.write_text(environment_file(ENVIRONMENTS))
        each = 'eval "value=\\$$name"; printf "%s\\0" "$value"'
        script = f". {file.resolve()}; for name in {' '.join(ENVIRONMENTS)}; do {each}; done"
        found = subprocess.run(["/bin/sh", "-c", script], check=True, capture_output=True)
        self.assertEqual(found.stdout.decode().split("\0")[:-1], list(ENVIRONMENTS.values()))

    def test_names_that_no_shell_has_are_left_out(self) -> None:
        self.assertEqual(
            environment_file({"a.b": "c", "1": "2", "x-y": "z", "_OK": "1", "N": "\0"}), "_OK=1\n"
        )


class FirstBootTests(SynchronousTestCase):
    def test_a_root_that_stays_learns_of_each_pod_and_its_network_at_each_boot(self) -> None:
        copy = GuestDocument("s1", node_key=NODE_KEY, host_key=HOST_KEY, files={"/etc/a": GuestFile(b"x")})
        kept = GuestDocument(
            "s1", node_key=NODE_KEY, host_key=HOST_KEY, files={"/etc/a": GuestFile(b"x")}, instance_id="r"
        )
        self.assertNotIn("updates", added(copy))
        self.assertEqual(added(kept)["updates"], {"network": {"when": ["boot-new-instance", "boot"]}})
        self.assertNotIn("/etc/a", _script(copy))
        self.assertNotIn("write_files", added(kept))
        self.assertIn("put /etc/a 644", _script(kept))
        self.assertIn("put /etc/ssh/ssh_host_ed25519_key 600", _script(kept))


def _written(document: GuestDocument) -> list[dict[str, str]]:
    found = added(document)["write_files"]
    assert isinstance(found, list)
    return found


def _script(document: GuestDocument) -> str:
    found = added(document)["bootcmd"]
    assert isinstance(found, list)
    return str(found[0])
