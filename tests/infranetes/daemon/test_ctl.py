# SPDX-License-Identifier: Apache-2.0
"""infranetes-ctl as a process against a daemon as a process."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
from typing import IO

from twisted.internet.threads import deferToThread

from infranetes.config.schema import CONTROL_SOCKET
from infranetes.ctl.cli import DONE, DOWN, FAILED, INTERRUPTED, USAGE
from infranetes.ctl.commands import COMMANDS
from infranetes.pods.store.store import FILE
from infranetes_common.wire import cri
from tests.harness.durations import slow
from tests.harness.needs import needs_registry
from tests.infranetes.daemon.case import ROOT, reactor
from tests.infranetes.daemon.ctl import CtlCase
from tests.infranetes.kubernetes.api_server import SimulatedApiServer
from tests.infranetes.services import objects as written
from tests.support import warm


@needs_registry
class CtlTests(CtlCase):
    def setUp(self) -> None:
        super().setUp()
        self.config["times"] = {"sweep": 3600.0}  # the daemon notices lost VMs only on request

    async def test_pods_and_orphans(self) -> None:
        await self.start()
        mode = stat.S_IMODE((self.root / "run" / CONTROL_SOCKET).stat().st_mode)
        self.assertEqual(mode, 0o600)
        sandbox = await self.run_pod("web")
        words = await self.command("pods", "--socket", str(self.root / "run" / CONTROL_SOCKET))
        self.assertIn("default     web", words)
        (pod,) = (await self.json("pods"))["pods"]
        (vm,) = await self.vms()
        self.assertEqual((pod["id"], pod["state"], pod["vm"]["id"]), (sandbox, "ready", vm["id"]))
        self.assertEqual(await self.json("orphans"), {"vms": [], "troubles": []})

        await self.kill()  # and lose its records
        for suffix in ("", "-wal", "-shm"):
            (self.root / "state" / (FILE + suffix)).unlink(missing_ok=True)
        await self.start()
        (orphan,) = (await self.json("orphans"))["vms"]
        self.assertEqual(
            (orphan["id"], orphan["sandbox_id"], orphan["provider"]), (vm["id"], sandbox, "simulated")
        )
        self.assertEqual((await self.json("end-orphans", "--dry-run"))["ended"][0]["id"], vm["id"])
        self.assertEqual(len(await self.vms()), 1)
        self.assertIn("nothing was ended", await self.ctl("end-orphans", "sim-none", code=FAILED))
        self.assertIn("1 orphan ended", await self.ctl("end-orphans", vm["id"]))
        self.assertEqual(await self.vms(), [])
        self.assertIn("no orphans", await self.ctl("end-orphans"))

    async def test_a_pod_whose_containers_can_not_be_held_still_goes_on(self) -> None:
        await self.start()
        sandbox = await self.run_pod("web")
        container = await self.run_container(sandbox, self.box(script="exec sleep 1000"))
        words = await self.ctl("keep", "web", "--as", "warm", code=FAILED)
        self.assertIn("it can't be kept", words)
        request = cri.ExecSyncRequest(container_id=container, cmd=["echo", "on"], timeout=60)
        self.assertEqual((await self.runtime.ExecSync(request, timeout=90.0)).stdout, b"on\n")
        self.assertEqual(await self.json("kept"), {"states": []})
        self.assertEqual([path for path in (self.root / "state" / "kept").glob("*/*")], [])

    async def metrics(self) -> set[tuple[str, int]]:
        """Return names and values of the only pod's metrics, once its VM has measured."""
        deadline = reactor.seconds() + 60
        while reactor.seconds() < deadline:
            answer = await self.runtime.ListPodSandboxMetrics(
                cri.ListPodSandboxMetricsRequest(), timeout=30.0
            )
            if answer.pod_metrics:
                return {(one.name, one.value.value) for one in answer.pod_metrics[0].metrics}
            await self.sleep(0.1)
        self.fail("there are no metrics")

    async def test_services(self) -> None:
        server = SimulatedApiServer(reactor)
        server.start()
        self.addCleanup(server.stop)
        server.put("/api/v1/nodes", {"metadata": {"name": "node", "labels": {}}})
        server.put("/api/v1/services", written.service())
        slices = written.endpoint_slice(written.endpoint("10.1.0.1"))
        server.put("/apis/discovery.k8s.io/v1/endpointslices", slices)
        kubeconfig = self.root / "kubeconfig"
        server.kubeconfig(kubeconfig, tokenFile="token")
        (self.root / "token").write_text("secret")
        self.config["kubernetes"] = {"kubeconfig": str(kubeconfig)}
        await self.start()
        await self.run_pod("web")
        deadline = reactor.seconds() + 60
        while not (found := await self.json("services"))["complete"]:
            self.assertLess(reactor.seconds(), deadline, "the API server is not followed")
            await self.sleep(0.1)
        (rule,) = found["rules"]
        self.assertEqual((rule["services"], rule["endpoints"]), (["ns/web"], ["10.1.0.1:8080"]))
        words = await self.ctl("services", "default/web", code=FAILED)  # simulated VMs have no service proxy
        self.assertIn("default/web", words)
        words = await self.ctl("services", "default/web", "--trace", "10.96.0.10:80", code=FAILED)
        self.assertIn("is ns/web's", words)
        self.assertIn("no service proxy", words)
        self.assertIn(("infranetes_service_rules_current", 0), await self.metrics())
        self.assertIn("no pod 'none' has a VM", await self.ctl("services", "none", code=FAILED))
        self.assertIn("don't hold on this node", await self.ctl("policies"))
        self.assertIn("no pod 'none' has a VM", await self.ctl("policies", "none", code=FAILED))
        self.assertIn("needs a POD", await self.command("services", "--trace", "10.96.0.10:80", code=USAGE))
        self.assertIn("is not like", await self.command("services", "x", "--trace", "web", code=USAGE))

    async def test_every_command_answers_with_json(self) -> None:
        await self.start()
        sandbox = await self.run_pod("web")
        said: dict[str, tuple[list[str], int]] = {
            "get": ([], FAILED),  # and says what
            "pods": ([], DONE),
            "ps": ([], DONE),
            "events": ([], DONE),
            "explain": ([], DONE),
            "describe": ([sandbox], DONE),
            "console": ([sandbox], FAILED),  # simulated VMs have neither consoles nor sizes
            "enter": ([sandbox], FAILED),  # not allowed by the configuration
            "exec": ([sandbox, "--", "true"], FAILED),  # it has no container
            "screenshot": ([sandbox], FAILED),
            "vnc": ([sandbox], FAILED),
            "checkpoint": ([sandbox, str(self.root / "web.tar")], DONE),
            "keep": ([sandbox, "--as", "warm"], FAILED),  # it has no container that runs
            "kept": ([], DONE),
            "sleep": ([sandbox], DONE),
            "wake": ([sandbox], DONE),
            "logs": ([sandbox], FAILED),  # the sandbox has no container
            "top": ([], DONE),
            "support-bundle": ([str(self.root / "bundle.tar.gz")], DONE),
            "services": ([], DONE),
            "policies": ([], DONE),
            "sizes": (["--cpu", "2"], FAILED),
            "orphans": ([], DONE),
            "end-orphans": ([], DONE),
            "pool": ([], DONE),
            "drain": ([], DONE),
            "fill": ([], DONE),
            "config": ([], DONE),
        }
        self.assertEqual(said.keys(), {name for name, each in COMMANDS.items() if each.alone})
        for name, (arguments, code) in said.items():
            document = json.loads(await self.ctl("--json", name, *arguments, code=code))
            self.assertIsInstance(document, dict)
            self.assertEqual(list(document) == ["error"], code == FAILED, f"{name}: {document}")

    def watch(self, command: str) -> tuple[subprocess.Popen[str], IO[str]]:
        """Start `COMMAND --watch`, and return the process and its output."""
        # A shell that starts the tests in the background has them, and their children, ignore SIGINT.
        config = str(self.root / "infranetes.toml")
        program = warm.command("-m", "infranetes.ctl.cli", command, "--watch", "--config", config)
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        watching = subprocess.Popen(
            ["env", "--default-signal=INT", *program], stdout=subprocess.PIPE, env=environment, text=True
        )
        self.addCleanup(watching.wait)
        self.addCleanup(watching.kill)
        assert watching.stdout is not None
        self.addCleanup(watching.stdout.close)
        return watching, watching.stdout

    async def test_pods_are_watched(self) -> None:
        await self.start()
        watching, lines = self.watch("pods")
        sandbox = await self.run_pod("web")
        while (told := json.loads(await deferToThread(lines.readline)))["pod"]["state"] != "ready":
            self.assertEqual(told["pod"]["id"], sandbox)
        watching.send_signal(signal.SIGINT)
        self.assertEqual(await deferToThread(watching.wait), INTERRUPTED)

    @slow(5, "figures are watched every two seconds")
    async def test_what_pods_use_is_watched(self) -> None:
        await self.start()
        sandbox = await self.run_pod("web")
        watching, lines = self.watch("top")
        for _ in range(2):
            told = json.loads(await deferToThread(lines.readline))
            self.assertEqual(told["pod"]["id"], sandbox)
        watching.send_signal(signal.SIGINT)
        self.assertEqual(await deferToThread(watching.wait), INTERRUPTED)

    async def test_lists_and_commands_of_a_container(self) -> None:
        await self.start()
        sandbox = await self.run_pod("web-7d4b9")
        container = await self.run_container(sandbox, self.box(script="sleep 600"))
        config = ["--config", str(self.root / "infranetes.toml")]
        self.assertEqual(await self.ctl("get", "containers", "-q"), f"{container}\n")
        self.assertEqual(await self.ctl("get", "pods", "-n", "default", "-o", "name"), "pod/web-7d4b9\n")
        self.assertIn("main", await self.ctl("describe", "pod", "web"))
        events = (await self.json("events", "web"))["events"]
        self.assertIn("the VM starts", {each["what"] for each in events})
        said = await self.command("exec", "web-7d4b9", *config, "--", "echo", "hello")
        self.assertEqual(said, "hello\n")
        await self.command("exec", *config, container[:12], "--", "sh", "-c", "exit 7", code=7)
        offered = await self.command_of("infranetes.ctl", "__complete", "pods", "w", "describe", *config)
        self.assertEqual(offered, "web-7d4b9\n")

    async def test_without_a_daemon_it_says_so(self) -> None:
        (self.root / "infranetes.toml").write_text(self.written())
        words = await self.command("pods", "--config", str(self.root / "infranetes.toml"), code=DOWN)
        self.assertIn("no infranetes daemon answers", words)
        (self.root / "run").mkdir()
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(self.root / "run" / CONTROL_SOCKET))
        self.assertIn("nobody listens there", await self.ctl("pods", code=DOWN))

    async def test_its_command_line(self) -> None:
        words = await self.command("--help")
        for word in ("pods", "end-orphans", "drain", "exit status"):
            self.assertIn(word, words)
        self.assertIn("nonsense", await self.command("nonsense", code=USAGE))
        self.assertIn("/no/such", await self.command("pods", "--config", "/no/such", code=USAGE))
