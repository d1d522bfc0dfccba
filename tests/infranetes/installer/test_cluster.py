# SPDX-License-Identifier: Apache-2.0
"""What the installer asks of the API server, by a server of HTTP."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, cast

from twisted.trial.unittest import SynchronousTestCase

from infranetes.installer.__main__ import Keeper, remove_everywhere
from infranetes.installer.cluster import INSTALL, STATE, VMS, ApiServer, DaemonSet, Node
from infranetes.installer.steps import Installer
from infranetes_common.errors import FailedPrecondition, Unavailable
from tests.support.certificates import issue_certificate

NODE = "/api/v1/nodes/node-1"
DAEMONSET = "/apis/apps/v1/namespaces/infranetes-system/daemonsets/infranetes-installer"


def merged(old: Any, change: Any) -> Any:
    """RFC 7396."""
    if not isinstance(change, dict):
        return change
    result = dict(old) if isinstance(old, dict) else {}
    for name, value in change.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merged(result.get(name), value)
    return result


class FakeApiServer:
    """An API server that has objects by their paths. :ivar status: what it answers all requests with."""

    def __init__(self, objects: dict[str, Any], tls: ssl.SSLContext | None = None) -> None:
        self.objects = objects
        self.status = 200
        self.seen: list[tuple[str, str, str]] = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *arguments: object) -> None:
                pass

            def do_GET(self) -> None:
                self._answer("GET", None)

            def do_PATCH(self) -> None:
                self._answer("PATCH", self.rfile.read(int(self.headers["Content-Length"])))

            def _answer(self, method: str, data: bytes | None) -> None:
                fake.seen.append((method, self.path, self.headers["Authorization"]))
                status = fake.status if self.path in fake.objects else 404
                if status == 200 and data is not None:
                    assert self.headers["Content-Type"] == "application/merge-patch+json"
                    fake.objects[self.path] = merged(fake.objects[self.path], json.loads(data))
                body = json.dumps(fake.objects.get(self.path, {})).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class ClusterCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.api = FakeApiServer(
            {
                NODE: {"metadata": {"name": "node-1", "labels": {INSTALL: "true", "other": "kept"}}},
                DAEMONSET: {"metadata": {"generation": 1}, "spec": {"template": {}}, "status": {}},
            }
        )
        self.addCleanup(self.api.stop)
        self.directory = Path(self.mktemp())
        self.directory.mkdir()
        (self.directory / "token").write_text("first\n")
        self.server = ApiServer("127.0.0.1", self.api.port, self.directory)

    @property
    def labels(self) -> dict[str, str]:
        return dict(self.api.objects[NODE]["metadata"]["labels"])


class NodeTests(ClusterCase):
    def test_labels_are_read_set_and_deleted_and_others_stay(self) -> None:
        node = Node("node-1", self.server)
        self.assertEqual(node.labels(), {INSTALL: "true", "other": "kept"})
        node.set_label(VMS, "true")
        node.set_label(VMS, "true")
        self.assertEqual(self.labels, {INSTALL: "true", "other": "kept", VMS: "true"})
        node.set_label(VMS, None)
        node.set_label(VMS, None)
        self.assertEqual(self.labels, {INSTALL: "true", "other": "kept"})

    def test_the_token_is_read_each_time(self) -> None:
        node = Node("node-1", self.server)
        node.labels()
        (self.directory / "token").write_text("second")
        node.labels()
        self.assertEqual([token for _, _, token in self.api.seen], ["Bearer first", "Bearer second"])

    def test_a_refusal_names_the_object_and_not_the_token(self) -> None:
        self.api.status = 403
        error = str(self.assertRaises(Unavailable, Node("node-1", self.server).labels))
        self.assertIn(NODE, error)
        self.assertIn("403", error)
        self.assertNotIn("first", error)

    def test_a_certificate_that_gos_programs_take_is_taken(self) -> None:
        """As by Python 3.13, whose default refuses one without identifiers of keys."""
        issued = issue_certificate("api")
        (self.directory / "ca.crt").write_bytes(issued.authority)
        (self.directory / "chain").write_bytes(issued.certificate + issued.key)
        serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        serving.load_cert_chain(self.directory / "chain")
        api = FakeApiServer(self.api.objects, serving)
        self.addCleanup(api.stop)
        default = ssl.create_default_context

        def strict(cafile: str) -> ssl.SSLContext:
            context = default(cafile=cafile)
            context.verify_flags |= ssl.VERIFY_X509_STRICT
            return context

        self.patch(ssl, "create_default_context", strict)
        node = Node("node-1", ApiServer("127.0.0.1", api.port, self.directory))
        self.assertEqual(node.labels()[INSTALL], "true")

    def test_a_server_that_is_away_is_told(self) -> None:
        self.api.stop()
        self.addCleanup(self.setUp)
        self.assertRaises(Unavailable, Node("node-1", self.server).labels)
        self.api.stop = lambda: None  # type: ignore[method-assign]


class FakeInstaller:
    """An installer that does what it is told, and fails when told to."""

    def __init__(self, labels: ClusterCase) -> None:
        self.done: list[tuple[str, bool]] = []
        self.error: Exception | None = None
        self._case = labels

    def _do(self, what: str) -> None:
        self.done.append((what, VMS in self._case.labels))
        if self.error is not None:
            raise self.error

    def present(self) -> None:
        self._do("present")

    def absent(self) -> None:
        self._do("absent")


class KeeperTests(ClusterCase):
    def setUp(self) -> None:
        super().setUp()
        self.installer = FakeInstaller(self)
        self.ready = self.directory / "ready"
        self.patch(__import__("infranetes.installer.__main__", fromlist=["say"]), "say", lambda words: None)

    def keeper(self, state: str = "present") -> Keeper:
        return Keeper(cast(Installer, self.installer), Node("node-1", self.server), state, self.ready)

    def test_the_node_is_for_vms_once_its_daemon_serves(self) -> None:
        self.assertTrue(self.keeper().once())
        self.assertEqual(self.installer.done, [("present", False)])
        self.assertEqual(self.labels[VMS], "true")
        self.assertTrue(self.ready.exists())

    def test_what_the_installer_before_has_said_of_the_node_does_not_count(self) -> None:
        self.ready.touch()
        self.keeper()
        self.assertFalse(self.ready.exists())

    def test_and_no_longer_before_it_is_removed(self) -> None:
        self.keeper().once()
        self.assertTrue(self.keeper("absent").once())
        self.assertEqual(self.installer.done[-1], ("absent", False))
        self.assertNotIn(VMS, self.labels)

    def test_the_nodes_own_label_has_it_removed_from_that_node(self) -> None:
        self.api.objects[NODE]["metadata"]["labels"][INSTALL] = "absent"
        self.keeper().once()
        self.assertEqual(self.installer.done, [("absent", False)])

    def test_what_fails_is_tried_again_and_the_node_is_not_ready(self) -> None:
        self.keeper().once()
        self.installer.error = FailedPrecondition("two pods are VMs")
        keeper = self.keeper("absent")
        self.assertFalse(keeper.once())
        self.assertFalse(self.ready.exists())
        self.assertNotIn(VMS, self.labels)  # no further pod comes meanwhile
        self.installer.error = None
        self.assertTrue(keeper.once())
        self.assertTrue(self.ready.exists())

    def test_nothing_is_done_while_nobody_says_what_is_wanted(self) -> None:
        self.api.status = 500
        self.assertFalse(self.keeper().once())
        self.assertEqual(self.installer.done, [])


class DaemonSetTests(ClusterCase):
    def setUp(self) -> None:
        super().setUp()
        self.said: list[str] = []
        self.patch(__import__("infranetes.installer.__main__", fromlist=["say"]), "say", self.said.append)
        self.api.objects[DAEMONSET]["metadata"]["generation"] = 2

    def remove(self, *steps: Mapping[str, int]) -> int:
        """Have all removed, with another status at each look; return how often was waited."""
        following, pauses = iter(steps), []

        def sleep(seconds: float) -> None:
            pauses.append(seconds)
            step = next(following)
            self.api.status = step.get("answer", 200)
            self.api.objects[DAEMONSET]["status"] = step

        remove_everywhere(DaemonSet("infranetes-system/infranetes-installer", self.server), sleep)
        return len(pauses)

    def test_all_nodes_are_told_and_waited_for(self) -> None:
        steps = [
            {
                "observedGeneration": generation,
                "desiredNumberScheduled": 2,
                "updatedNumberScheduled": updated,
                "numberReady": 2,  # as a kubelet that was just started says
                "numberAvailable": available,
            }
            for generation, updated, available in ((1, 2, 2), (2, 1, 2), (2, 2, 1), (2, 2, 2))
        ]
        self.assertEqual(self.remove(*steps), 4)
        annotations = self.api.objects[DAEMONSET]["spec"]["template"]["metadata"]["annotations"]
        self.assertEqual(annotations, {STATE: "absent"})

    def test_a_control_plane_that_is_restarted_meanwhile_is_waited_for(self) -> None:
        self.assertEqual(self.remove({"answer": 503}, {"answer": 503}, {"observedGeneration": 2}), 3)
        self.assertEqual(len(self.said), 3)  # the second time is not told again
        self.assertIn("503", self.said[1])
        self.assertEqual(self.said[-1], "every node is as it was")
