# SPDX-License-Identifier: Apache-2.0
"""`kubectl infranetes` against a daemon as a process, which asks an API server what may be seen."""

from __future__ import annotations

import json
import re

from twisted.internet.threads import deferToThread
from twisted.web.http import Request

from infranetes.ctl.kubectl import Cluster, Node, parser
from infranetes.kubernetes.reviews import TOKENS
from infranetes_common.errors import Unavailable
from infranetes_common.wire import control
from tests.harness.needs import needs_registry
from tests.infranetes.daemon.case import DaemonCase, reactor
from tests.infranetes.kubernetes.api_server import SimulatedApiServer
from tests.infranetes.kubernetes.test_reviews import VIEWER, token
from tests.support.certificates import make_certificate


class ReviewingApiServer(SimulatedApiServer):
    """An API server that knows one token, and lets its user list pods of one namespace."""

    def render_POST(self, request: Request) -> bytes:
        spec = json.loads(request.content.read())["spec"]
        if request.path.decode() == TOKENS:
            known = spec["token"] == token("infranetes")
            status: object = {"authenticated": known, "user": VIEWER, "audiences": spec["audiences"]}
        else:
            status = {"allowed": spec["resourceAttributes"]["namespace"] == "default"}
        request.setResponseCode(201)
        return json.dumps({"status": status}).encode()


@needs_registry
class KubectlTests(DaemonCase):
    async def test_what_a_user_may_see_is_shown_over_tls(self) -> None:
        server = ReviewingApiServer(reactor)
        server.start()
        self.addCleanup(server.stop)
        server.kubeconfig(self.root / "kubeconfig")
        certificate, key = make_certificate("node")
        (self.root / "certificate").write_bytes(certificate)
        (self.root / "key").write_bytes(key)
        (self.root / "key").chmod(0o600)
        self.config["kubernetes"] = {"kubeconfig": str(self.root / "kubeconfig"), "service_proxy": False}
        self.config["metrics"] = {
            "listen": "127.0.0.1:0",
            "certificate_file": str(self.root / "certificate"),
            "key_file": str(self.root / "key"),
            "kubectl_audience": "infranetes",
        }
        await self.start()
        sandbox = await self.run_pod("web")
        port = re.findall(r"metrics are served on https://127\.0\.0\.1:(\d+)/", self.log)[-1]
        flags = ["--port", port, "--certificate-authority", str(self.root / "certificate"), "pods"]

        def ask(shown: str, path: str) -> list[str]:
            cluster = Cluster(lambda words: shown.encode(), parser().read(flags))
            cluster.log_in()
            answer = cluster.ask(Node("node", "127.0.0.1"), path, control.ListPodsResponse)
            return [pod.id for pod in answer.pods]

        mine, forged = token("infranetes"), token("infranetes", name="forged")
        self.assertEqual(await deferToThread(ask, mine, "pods?namespace=default"), [sandbox])
        for shown, path, words in (
            (mine, "pods", r"may not list pods of all namespaces.*\(403\)"),
            (forged, "pods?namespace=default", r"does not know this token.*\(401\)"),
            ("opaque", "pods?namespace=default", r"kubectl create token.*\(401\)"),
            (mine, "pool", r"nothing at this path \(404\)"),
        ):
            with self.assertRaises(Unavailable) as caught:
                await deferToThread(ask, shown, path)
            self.assertRegex(str(caught.exception), words)
