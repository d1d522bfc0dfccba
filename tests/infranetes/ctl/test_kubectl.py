# SPDX-License-Identifier: Apache-2.0
"""`kubectl infranetes` against a node, by TLS over a real socket; kubectl itself is a fake."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import ssl
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from twisted.internet.address import IPv4Address
from twisted.internet.endpoints import TCP4ServerEndpoint
from twisted.internet.protocol import ServerFactory
from twisted.internet.threads import deferToThread
from twisted.protocols.tls import TLSMemoryBIOFactory
from twisted.trial import unittest
from twisted.web.resource import Resource

from infranetes.control.remote import RemotePods
from infranetes.control.usage import UsageCalls
from infranetes.ctl import kubectl, render
from infranetes.ctl.kubectl import Cluster, carry_out, parser
from infranetes.ctl.view import JSON, YAML
from infranetes.kubernetes.reviews import Reviewer
from infranetes.monitoring.access import thd_read_tls
from infranetes.monitoring.site import QuietSite
from infranetes.stats.gather import Gatherer
from infranetes_common.concurrency import start
from infranetes_common.errors import InfranetesError, NotFound, Unavailable
from infranetes_common.reactors import installed
from tests.infranetes.kubernetes.test_reviews import ApiServer, token
from tests.infranetes.pods.fakes import FakeNode, pod
from tests.support.certificates import issue_certificate, make_certificate


class KubectlCase(unittest.TestCase):
    """A cluster of one node, with a pod in each of two namespaces.

    :ivar ran: what kubectl was run with. :ivar addresses: of the nodes, by name.
    """

    async def setUp(self) -> None:
        self.world, self.server = FakeNode(), ApiServer()
        self.world.provider_ready()
        self.addCleanup(self.world.kill)
        for namespace in ("default", "other"):
            config = pod("web")
            config.metadata.namespace = namespace
            await start(self.world.sandboxes.run(config, ""))
        self.server.allowed = [("list", "default"), ("get", "default")]
        self.certificate, key = make_certificate("node")
        self.port = await self.listen(self.certificate, key)
        self.ran: list[list[str]] = []
        self.addresses = {"node1": "127.0.0.1"}
        self.token = token("infranetes")
        self.authority = self.certificate

    async def listen(self, certificate: bytes, key: bytes) -> int:
        """Serve as the daemon does; return the port."""
        node, world = self.world.node, self.world
        remote = RemotePods(
            Reviewer(world.clock, self.server.ask, "infranetes"),
            node.inventory,
            world.control,
            world.description,
            UsageCalls(world.clock, node.inventory, node.providers, Gatherer(world.clock, world.listing)),
        )
        root = Resource()
        root.putChild(b"v1", remote.resource())
        files = Path(self.mktemp()).absolute(), Path(self.mktemp()).absolute()
        for file, content in zip(files, (certificate, key), strict=True):
            file.write_bytes(content)
            file.chmod(0o600)
        site = cast(ServerFactory, QuietSite(root, lambda request: None))
        factory = TLSMemoryBIOFactory(thd_read_tls(str(files[0]), str(files[1])), False, site)
        endpoint = TCP4ServerEndpoint(installed(), 0, interface="127.0.0.1")
        port = await endpoint.listen(cast(ServerFactory, factory))
        self.addCleanup(port.stopListening)
        return cast(IPv4Address, port.getHost()).port

    def run_kubectl(self, words: Sequence[str]) -> bytes:
        self.ran.append([*words])
        match [*words][:2]:
            case ["create", "token"]:
                return self.token.encode() + b"\n"
            case ["get", "nodes"]:
                return json.dumps({"items": [self.node(name) for name in self.addresses]}).encode()
            case ["get", "node"]:
                return json.dumps(self.node(words[2])).encode()
            case ["get", "pod"]:
                return b"node1" if words[2] == "web" else b""
            case _:
                data = base64.b64encode(self.authority).decode()
                cluster = {"name": "c", "cluster": {"certificate-authority-data": data}}
                context = {"name": "x", "context": {"cluster": "c"}}
                return json.dumps({"clusters": [cluster], "contexts": [context]}).encode()

    def node(self, name: str) -> dict[str, Any]:
        addresses = [{"type": "Hostname", "address": name}]
        addresses += [{"type": "InternalIP", "address": self.addresses[name]}]
        return {"metadata": {"name": name}, "status": {"addresses": addresses}}

    async def said(self, *words: str, code: int = 0) -> tuple[str, str]:
        """Run a command. Return what is printed on both streams."""
        options = parser().read(["--port", str(self.port), *words])
        options.json = options.json or options.form in (JSON, YAML)
        out, told = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(told):
            ended = await deferToThread(carry_out, Cluster(self.run_kubectl, options), options)
        self.assertEqual(ended, code, told.getvalue())
        return out.getvalue(), told.getvalue()

    async def refused(self, *words: str) -> str:
        with self.assertRaises(InfranetesError) as caught:
            await self.said(*words)
        return str(caught.exception)


class ClusterTests(KubectlCase):
    async def test_pods_of_a_namespace_with_their_nodes(self) -> None:
        out, _ = await self.said("pods")
        head, row, counted = out.splitlines()
        self.assertIn("NODE", head.split())
        self.assertEqual(row.split()[:4], ["default", "web", "0/0", "ready"])
        self.assertIn("node1", row.split())
        self.assertTrue(counted.startswith("1 pod"), counted)
        created = next(words for words in self.ran if words[:2] == ["create", "token"])
        self.assertEqual(
            created[2:],
            ["infranetes-viewer", "--namespace=kube-system", "--audience=infranetes", "--duration=10m"],
        )

    async def test_documents(self) -> None:
        out, _ = await self.said("pods", "-o", "json")
        (found,) = json.loads(out)["pods"]
        self.assertEqual((found["name"], found["node"]), ("web", "node1"))
        self.assertEqual((await self.said("pods", "-o", "name"))[0], "pod/web\n")

    async def test_one_pod_is_asked_of_its_node_alone(self) -> None:
        out, _ = await self.said("describe", "pod", "web")
        self.assertIn("pod        default/web", out)
        self.assertIn("the VM starts", out)
        self.assertNotIn(["get", "nodes", "--output=json"], self.ran)
        self.assertIn("on no node yet", await self.refused("describe", "pending"))

    async def test_what_may_not_be_seen(self) -> None:
        for words in (("pods", "-A"), ("pods", "-n", "other")):
            out, told = await self.said(*words, code=1)
            self.assertNotIn("web", out)
            self.assertIn("node node1: ", told)
            self.assertIn("may not list pods", told)
        self.assertIn("may not get pods web", await self.refused("describe", "-n", "other", "web"))

    async def test_a_node_that_does_not_answer_hides_no_other(self) -> None:
        self.addresses["node2"] = "127.0.0.2"
        out, told = await self.said("pods", code=1)
        self.assertIn("web", out)
        self.assertIn("node node2: 127.0.0.2", told)

    async def test_a_daemon_that_somebody_else_certifies_gets_no_token(self) -> None:
        self.authority, _ = make_certificate("another")
        _, told = await self.said("pods", code=1)
        self.assertIn("certificate verify failed", told)
        self.assertEqual(self.server.asked, [])

    async def test_a_certificate_that_gos_programs_take_is_taken(self) -> None:
        """As by Python 3.13, whose default refuses one without identifiers of keys."""
        issued = issue_certificate("node")
        self.authority = issued.authority
        self.port = await self.listen(issued.certificate, issued.key)
        default = ssl.create_default_context

        def strict(cadata: str) -> ssl.SSLContext:
            context = default(cadata=cadata)
            context.verify_flags |= ssl.VERIFY_X509_STRICT
            return context

        self.patch(ssl, "create_default_context", strict)
        self.assertIn("web", (await self.said("pods"))[0])

    async def test_a_token_that_is_refused(self) -> None:
        self.token = token("https://kubernetes.default.svc")
        _, told = await self.said("pods", code=1)
        self.assertIn("kubectl create token NAME --audience infranetes", told)

    async def test_what_a_node_sends_moves_no_cursor(self) -> None:
        self.patch(render, "as_text", lambda *_: "a\x1b[2J\tb\nc")
        out, _ = await self.said("describe", "web")
        self.assertEqual(out, "a?[2J\tb\nc\n")


class ProgramTests(unittest.SynchronousTestCase):
    """The real kubectl's place in it."""

    def test_without_kubectl(self) -> None:
        self.patch(subprocess, "run", self.missing)
        run = kubectl.run_kubectl(parser().read(["pods"]))
        with self.assertRaises(Unavailable) as caught:
            run(["get", "nodes"])
        self.assertIn("there is no kubectl in PATH", str(caught.exception))

    def missing(self, *words: object, **options: object) -> None:
        raise FileNotFoundError

    def test_its_flags_and_its_errors(self) -> None:
        asked: list[list[str]] = []

        class Done:
            returncode, stdout, stderr = 1, b"", b"Error from server (Forbidden)"

        def run(words: list[str], **options: object) -> Done:
            asked.append(words)
            return Done()

        self.patch(subprocess, "run", run)
        options = parser().read(["--context", "x", "pods", "--kubeconfig", "/k"])
        with self.assertRaises(Unavailable) as caught:
            kubectl.run_kubectl(options)(["get", "nodes"])
        self.assertIn("kubectl get: Error from server (Forbidden)", str(caught.exception))
        self.assertEqual(asked, [["kubectl", "get", "nodes", "--context=x", "--kubeconfig=/k"]])


class AskedTests(unittest.SynchronousTestCase):
    """What kubectl is asked, and what is made of its answers."""

    def setUp(self) -> None:
        self.ran: list[list[str]] = []
        self.answers: dict[str, object] = {}

    def cluster(self, *words: str) -> Cluster:
        return Cluster(self.run_kubectl, parser().read(["pods", *words]))

    def run_kubectl(self, words: Sequence[str]) -> bytes:
        self.ran.append([*words])
        answer = self.answers[words[1]]
        return answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()

    def node(self, name: str, **addresses: str) -> dict[str, object]:
        listed = [{"type": kind, "address": address} for kind, address in addresses.items()]
        return {"metadata": {"name": name}, "status": {"addresses": listed}}

    def test_a_node_is_asked_at_its_own_networks_address_if_it_has_one(self) -> None:
        self.answers["nodes"] = {
            "items": [
                self.node("a", Hostname="a", ExternalIP="203.0.113.1", InternalIP="10.0.0.1"),
                self.node("b", Hostname="b", ExternalIP="203.0.113.2"),
                self.node("c", Hostname="c"),
                self.node("d"),
            ]
        }
        addresses = {node.name: node.address for node in self.cluster().nodes()}
        self.assertEqual(addresses, {"a": "10.0.0.1", "b": "203.0.113.2", "c": "c", "d": ""})

    def test_of_one_node_that_one_alone_is_asked_for(self) -> None:
        self.answers["nodes"] = self.node("b", InternalIP="10.0.0.2")
        [node] = self.cluster("--node", "b").nodes()
        self.assertEqual((node.name, node.address), ("b", "10.0.0.2"))
        self.assertEqual(self.ran, [["get", "nodes", "b", "--output=json"]])

    def test_the_namespace_is_the_contexts_or_default(self) -> None:
        contexts: tuple[tuple[object, str], ...] = (
            ([{"context": {"namespace": "web"}}], "web"),
            ([{"context": {}}], "default"),
            ([{"context": {"namespace": None}}], "default"),
            ([{}], "default"),
            ([], "default"),
            (None, "default"),
        )
        for listed, namespace in contexts:
            self.answers["view"] = {"contexts": listed}
            self.assertEqual(self.cluster().namespace(), namespace)

    def test_a_pod_that_is_on_no_node_is_said_to_be(self) -> None:
        self.answers["pod"] = ""
        with self.assertRaisesRegex(NotFound, "pod web/new is on no node yet"):
            self.cluster().node_of("web", "new")

    def test_the_token_is_for_daemons_alone_and_for_minutes(self) -> None:
        self.answers |= {"token": "t\n", "view": {"clusters": []}}
        self.cluster("--service-account", "kube-system/viewer", "--audience", "mine").log_in()
        words = ["create", "token", "viewer", "--namespace=kube-system", "--audience=mine", "--duration=10m"]
        self.assertEqual(self.ran[0], words)

    def test_what_is_no_json_or_no_authority_is_told(self) -> None:
        for answer in ("<html>", "[]", ""):
            self.answers["nodes"] = answer
            with self.assertRaisesRegex(Unavailable, "no JSON"):
                self.cluster().nodes()
        self.answers |= {
            "token": "t",
            "view": {"clusters": [{"cluster": {"certificate-authority-data": "?"}}]},
        }
        with self.assertRaisesRegex(Unavailable, "certificate authority can't be used"):
            self.cluster().log_in()

    def test_an_account_has_a_namespace_and_a_name(self) -> None:
        for account in ("viewer", "a/b/c"):
            said = io.StringIO()
            with contextlib.redirect_stderr(said):
                self.assertEqual(kubectl.main(["pods", "--service-account", account]), 2)
            self.assertIn("NAMESPACE/NAME", said.getvalue())
