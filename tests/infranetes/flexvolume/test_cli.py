# SPDX-License-Identifier: Apache-2.0
"""What the driver prints for kubelet, and how it finds the daemon."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from infranetes.config import Config
from infranetes.config.schema import CONTROL_SOCKET
from infranetes.ctl import arguments as ctl
from infranetes.flexvolume.cli import DEFAULT_CONFIG, DEFAULT_SOCKET, SOCKET_NAME, answer, parser, socket_of
from infranetes.flexvolume.cli import Refused as NotDone

ROOT = Path(__file__).resolve().parents[3]
OPTIONS = json.dumps(
    {"volumeID": "data", "kubernetes.io/pod.uid": "uid-1", "kubernetes.io/pod.namespace": "shop"}
)
LINK = "usr/libexec/kubernetes/kubelet-plugins/volume/exec/infranetes.io~volume/volume"


class AnswerTests(SynchronousTestCase):
    def test_init_says_what_is_true(self) -> None:
        found = answer(["init"])
        self.assertEqual(found["status"], "Success")
        self.assertEqual(
            found["capabilities"],
            {
                "attach": False,
                "selinuxRelabel": False,
                "supportsMetrics": False,
                "fsGroup": False,
                "requiresFSResize": True,
            },
        )

    def test_the_volumes_name(self) -> None:
        for _ in range(2):
            found = answer(["getvolumename", OPTIONS])
            self.assertEqual(found, {"status": "Success", "volumeName": "data"})
        named = json.dumps({"size": "1", "kubernetes.io/pvOrVolumeName": "pv-1"})
        self.assertEqual(answer(["getvolumename", named])["volumeName"], "pv-1")

    def test_all_else_is_not_supported(self) -> None:
        for call in (
            "attach",
            "detach",
            "isattached",
            "waitforattach",
            "mountdevice",
            "unmountdevice",
            "expandvolume",
            "expandfs",
            "no-such",
        ):
            self.assertEqual(answer([call, "{}", "/dev/x", "1"]), {"status": "Not supported"})

    def test_what_is_wrong_is_an_answer_too(self) -> None:
        for arguments in (
            [],
            ["--bogus"],
            ["init", "more"],
            ["mount", "/d"],
            ["mount", "d", OPTIONS],
            ["mount", "/d", "{"],
            ["mount", "/" + "d" * 5000, OPTIONS],
            ["mount", "/d\n", OPTIONS],
            ["unmount"],
            ["getvolumename", "{"],
            ["unmount", "/d", "--config", "/no/such/file"],
        ):
            found = answer(arguments)
            self.assertEqual((found["status"], bool(found["message"])), ("Failure", True), arguments)

    def test_a_daemon_that_is_not_there_is_named(self) -> None:
        for arguments in (["mount", "/d", OPTIONS], ["unmount", "/d"]):
            message = str(answer(["--socket", "/no/such/socket", *arguments])["message"])
            self.assertIn("/no/such/socket can't be asked: No such file or directory", message)
        message = str(answer(["--socket", "/" + "s" * 200, "unmount", "/d"])["message"])
        self.assertIn("can't be asked: AF_UNIX path too long", message)

    def test_help_names_the_calls(self) -> None:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            self.assertRaises(SystemExit, parser().parse_args, ["--help"])
        for call in ("init", "getvolumename", "mount DIRECTORY", "unmount DIRECTORY"):
            self.assertIn(f"\n  {call}", out.getvalue())


class SocketTests(SynchronousTestCase):
    def socket(self, *arguments: str) -> str:
        return socket_of(parser().parse_args([*arguments, "init"]))

    def test_it_is_where_the_daemon_has_it(self) -> None:
        self.assertEqual(DEFAULT_SOCKET, Config().control_socket)
        self.assertEqual(SOCKET_NAME, CONTROL_SOCKET)
        self.assertEqual(Path(DEFAULT_CONFIG), ctl.DEFAULT_CONFIG)
        self.assertEqual(self.socket("--socket", "/s"), "/s")
        path = Path(self.mktemp())
        for text, found in (('run_dir = "/r"\n', "/r/control.sock"), ("[csi]\n", DEFAULT_SOCKET)):
            path.write_text(text)
            self.assertEqual(self.socket("--config", str(path)), found)

    def test_a_configuration_that_is_none_is_refused(self) -> None:
        path = Path(self.mktemp())
        for content in (b"run_dir = 1\n", b"run_dir\n", b"\xff\n"):
            path.write_bytes(content)
            self.assertRaises(NotDone, self.socket, "--config", str(path))
        self.assertRaises(NotDone, self.socket, "--config", "/")


class ProcessTests(SynchronousTestCase):
    def test_no_more_is_imported_than_a_call_needs(self) -> None:
        script = (
            "import sys; from infranetes.flexvolume.cli import answer; answer(sys.argv[1:]); "
            "found = {name.split('.')[0] for name in sys.modules}; "
            "print(*sorted(found & {'twisted', 'h2', 'google', 'attr'}))"
        )
        for arguments, found in (
            (["init"], ""),
            (["attach"], ""),
            (["getvolumename", OPTIONS], "attr"),
            (["--socket", "/no/such", "mount", "/d", OPTIONS], "attr google h2"),
        ):
            done = subprocess.run(
                [sys.executable, "-c", script, *arguments],
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=100,
            )
            self.assertEqual((done.stdout, done.stderr), (f"{found}\n", ""))

    def test_the_package_has_it_where_kubelet_looks(self) -> None:
        links = (ROOT / "debian/infranetes.links").read_text().split()
        self.assertEqual(links, ["usr/bin/infranetes-flexvolume", LINK])
        installed = (ROOT / "debian/infranetes.install").read_text().split()
        self.assertIn(links[0], installed)
        self.assertIn("infranetes-flexvolume=infranetes.flexvolume.cli:main", (ROOT / "setup.py").read_text())
