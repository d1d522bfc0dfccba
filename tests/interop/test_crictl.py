# SPDX-License-Identifier: Apache-2.0
"""Kubernetes' own client, crictl: every command that people use, against the daemon as a process."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

from twisted.internet.threads import deferToThread

from tests.harness.needs import needs_tools
from tests.infranetes.daemon.case import ROOT, DaemonCase
from tests.support.oci import busybox
from tests.support.registry import Registry

CRICTL = ROOT / "build" / "tools" / "crictl"
SECONDS = 60.0
UNKNOWN = "f" * 32


class CrictlCase(DaemonCase):
    """A daemon over simulated VMs, and crictl with the files that it reads."""

    def setUp(self) -> None:
        super().setUp()
        if not CRICTL.exists():
            self.fail(f"{CRICTL} is missing: make tools")
        address = f"unix://{self.socket}"
        yaml = f"runtime-endpoint: {address}\nimage-endpoint: {address}\ntimeout: 30\n"
        (self.root / "crictl.yaml").write_text(yaml)

    async def ran(self, *words: str) -> subprocess.CompletedProcess[str]:
        """crictl to its end."""
        command = [str(CRICTL), "--config", str(self.root / "crictl.yaml"), *words]
        return await deferToThread(  # type: ignore[no-any-return]
            subprocess.run, command, capture_output=True, text=True, timeout=SECONDS, check=False
        )

    async def crictl(self, *words: str) -> str:
        """What it says; it has to succeed."""
        done = await self.ran(*words)
        self.assertEqual(done.returncode, 0, f"crictl {' '.join(words)}: {done.stderr}\n{self.log[-2000:]}")
        return done.stdout.strip()

    async def json(self, command: str, *words: str) -> Any:
        return json.loads(await self.crictl(command, "-o", "json", *words))

    async def fails(self, *words: str) -> str:
        """What it says on stderr; it has to fail."""
        done = await self.ran(*words)
        self.assertNotEqual(done.returncode, 0, f"crictl {' '.join(words)} did not fail: {done.stdout}")
        return done.stderr

    def file(self, content: Any) -> str:
        path = Path(self.mktemp())
        path.write_text(json.dumps(content))
        return str(path)

    def pod_file(self, name: str = "web", namespace: str = "default", **fields: Any) -> str:
        metadata = {"name": name, "uid": f"uid-{name}", "namespace": namespace, "attempt": 0}
        logs = self.log_directory / name
        logs.mkdir(exist_ok=True)
        return self.file({"metadata": metadata, "log_directory": str(logs), "linux": {}, **fields})

    def box_file(self, name: str = "main", script: str = "sleep 1000", **fields: Any) -> str:
        return self.file(
            {
                "metadata": {"name": name, "attempt": 0},
                "image": {"image": self.image},
                "command": ["sh", "-c", script],
                "log_path": f"{name}.log",
                "linux": {},
                **fields,
            }
        )

    async def box_in(self, sandbox: str, pod: str, box: str) -> str:
        """Made and started; its id."""
        container = await self.crictl("create", sandbox, box, pod)
        self.assertEqual(await self.crictl("start", container), container)
        return container


@needs_tools("crictl")
class RuntimeTests(CrictlCase):
    async def test_version_names_the_runtime(self) -> None:
        await self.start()
        said = await self.crictl("version")
        self.assertRegex(said, r"RuntimeName:\s+infranetes")
        self.assertRegex(said, r"RuntimeVersion:\s+\d+\.\d+")
        self.assertRegex(said, r"RuntimeApiVersion:\s+v1\b")

    async def test_info_says_that_it_is_ready(self) -> None:
        await self.start()
        info = json.loads(await self.crictl("info"))
        conditions = {each["type"]: each["status"] for each in info["status"]["conditions"]}
        self.assertEqual(conditions, {"RuntimeReady": True, "NetworkReady": True})
        self.assertIn("simulated", json.dumps(info))

    async def test_runtime_config_is_told_and_taken(self) -> None:
        await self.start()
        self.assertRegex(await self.crictl("runtime-config"), r"cgroup driver:\s+SYSTEMD")
        await self.crictl("update-runtime-config", "--pod-cidr", "10.217.0.0/24")
        sandbox = await self.crictl("runp", self.pod_file())
        status = (await self.json("inspectp", sandbox))["status"]
        self.assertRegex(status["network"]["ip"], r"^10\.217\.0\.\d+$")

    async def test_a_daemon_that_is_not_there_is_said(self) -> None:
        self.assertIn(str(self.socket), await self.fails("version"))


@needs_tools("crictl")
class PodTests(CrictlCase):
    async def test_the_life_of_a_pod(self) -> None:
        await self.start()
        pod = self.pod_file(labels={"app": "web"}, annotations={"note": "ä"}, hostname="web")
        sandbox = await self.crictl("runp", pod)
        self.assertRegex(sandbox, r"^[0-9a-f]{32}$")
        self.assertIn(sandbox, await self.fails("runp", pod), "one sandbox per attempt; it is named")
        await self.sandbox_is_shown(sandbox)

        box = self.box_file(script="echo out; echo err >&2; sleep 1000", labels={"part": "main"})
        container = await self.crictl("create", sandbox, box, pod)
        self.assertEqual((await self.json("ps", "-a"))["containers"][0]["state"], "CONTAINER_CREATED")
        self.assertEqual((await self.json("ps"))["containers"], [], "ps shows what runs")
        await self.crictl("start", container)
        await self.container_is_shown(sandbox, container)

        said = await self.crictl("exec", "-s", container, "sh", "-c", "echo 'two words'; echo bad >&2")
        self.assertEqual(said.split("\n\n"), ["two words", "bad"])
        self.assertIn("exited with 7", await self.fails("exec", "-s", container, "sh", "-c", "exit 7"))
        await self.logs_are_shown(container)

        self.assertEqual(await self.crictl("stop", "-t", "0", container), container)
        await self.crictl("stop", container)
        status = (await self.json("inspect", container))["status"]
        self.assertEqual((status["state"], status["exitCode"]), ("CONTAINER_EXITED", 137))
        self.assertEqual((await self.json("ps"))["containers"], [])
        self.assertEqual(await self.crictl("ps", "-aq", "--state", "exited"), container)
        self.assertEqual(await self.crictl("rm", container), container)
        self.assertEqual((await self.json("ps", "-a"))["containers"], [])

        self.assertIn(sandbox, await self.crictl("stopp", sandbox))
        await self.crictl("stopp", sandbox)
        [shown] = (await self.json("pods"))["items"]
        self.assertEqual(shown["state"], "SANDBOX_NOTREADY")
        self.assertIn(sandbox, await self.crictl("rmp", sandbox))
        self.assertEqual((await self.json("pods"))["items"], [])
        self.assertEqual(await self.vms(), [])

    async def sandbox_is_shown(self, sandbox: str) -> None:
        [shown] = (await self.json("pods"))["items"]
        self.assertEqual((shown["id"], shown["state"]), (sandbox, "SANDBOX_READY"))
        self.assertEqual(shown["metadata"]["name"], "web")
        self.assertEqual((shown["labels"], shown["annotations"]), ({"app": "web"}, {"note": "ä"}))
        status = (await self.json("inspectp", sandbox))["status"]
        self.assertEqual((status["id"], status["state"]), (sandbox, "SANDBOX_READY"))
        self.assertRegex(status["network"]["ip"], r"^\d+\.\d+\.\d+\.\d+$")
        self.assertEqual(status["metadata"]["uid"], "uid-web")
        table = await self.crictl("pods")
        self.assertRegex(table, rf"(?m)^{sandbox[:13]}\s.*Ready\s+web\s+default\s+0\b")

    async def container_is_shown(self, sandbox: str, container: str) -> None:
        [shown] = (await self.json("ps"))["containers"]
        self.assertEqual((shown["id"], shown["podSandboxId"]), (container, sandbox))
        self.assertEqual((shown["state"], shown["labels"]), ("CONTAINER_RUNNING", {"part": "main"}))
        self.assertEqual(shown["image"]["image"], self.image)
        status = (await self.json("inspect", container))["status"]
        self.assertEqual(status["state"], "CONTAINER_RUNNING")
        self.assertEqual(status["logPath"], str(self.log_directory / "web" / "main.log"))
        self.assertTrue(status["createdAt"] <= status["startedAt"])
        self.assertRegex(await self.crictl("ps"), rf"(?m)^{container[:13]}\s.*Running\s+main\s+0\s")

    async def logs_are_shown(self, container: str) -> None:
        log = self.log_directory / "web" / "main.log"
        await self.until(lambda: log.exists() and log.read_text().count("\n") == 2, "both lines are logged")
        done = await self.ran("logs", container)
        self.assertEqual((done.stdout, done.stderr), ("out\n", "err\n"))
        done = await self.ran("logs", "--tail", "1", "--timestamps", container)
        self.assertRegex(done.stdout + done.stderr, r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+\S* \w+\n$")

    async def test_logs_are_followed_to_the_end(self) -> None:
        await self.start()
        pod = self.pod_file()
        sandbox = await self.crictl("runp", pod)
        script = "for n in 1 2 3; do echo line $n; sleep 0.2; done"
        container = await self.box_in(sandbox, pod, self.box_file(script=script))
        self.assertEqual(await self.crictl("logs", "-f", container), "line 1\nline 2\nline 3")
        status = (await self.json("inspect", container))["status"]
        self.assertEqual((status["exitCode"], status["reason"]), (0, "Completed"))

    async def test_run_does_it_all_and_rmp_forced_undoes_it(self) -> None:
        await self.start()
        container = await self.crictl("run", "--no-pull", self.box_file(), self.pod_file())
        [shown] = (await self.json("ps"))["containers"]
        self.assertEqual(shown["id"], container)
        await self.crictl("rmp", "-f", shown["podSandboxId"])
        self.assertEqual((await self.json("pods"))["items"], [])
        self.assertEqual((await self.json("ps", "-a"))["containers"], [])

    async def test_everything_goes_at_once(self) -> None:
        await self.start()
        for name in ("one", "two"):
            pod = self.pod_file(name)
            sandbox = await self.crictl("runp", pod)
            await self.box_in(sandbox, pod, self.box_file())
        await self.crictl("rm", "-fa")
        self.assertEqual((await self.json("ps", "-a"))["containers"], [])
        self.assertEqual(len((await self.json("pods", "--state", "ready"))["items"]), 2)
        await self.crictl("rmp", "-fa")
        self.assertEqual((await self.json("pods"))["items"], [])

    async def test_resources_are_updated(self) -> None:
        await self.start()
        pod = self.pod_file()
        sandbox = await self.crictl("runp", pod)
        container = await self.box_in(sandbox, pod, self.box_file())
        await self.crictl("update", "--cpu-share", "512", "--memory", str(64 << 20), container)
        limits = (await self.json("inspect", container))["status"]["resources"]["linux"]
        self.assertEqual((limits["cpuShares"], limits["memoryLimitInBytes"]), ("512", str(64 << 20)))


@needs_tools("crictl")
class FilterTests(CrictlCase):
    """Lists with their filters; identifiers may be shortened where they stay unique."""

    async def test_pods_are_filtered(self) -> None:
        await self.start()
        web = await self.crictl("runp", self.pod_file("web", labels={"app": "web", "tier": "front"}))
        data = await self.crictl("runp", self.pod_file("data", "storage", labels={"app": "data"}))
        await self.crictl("stopp", data)
        for words, expected in (
            (("--name", "web"), {web}),
            (("--namespace", "storage"), {data}),
            (("--state", "ready"), {web}),
            (("--state", "notready"), {data}),
            (("--label", "app=web"), {web}),
            (("--label", "app=web", "--label", "tier=back"), set()),
            (("--id", data), {data}),
            (("--id", data[:13]), {data}),
            (("--id", UNKNOWN), set()),
            (("--latest",), {data}),
            (("--last", "2"), {web, data}),
            ((), {web, data}),
        ):
            self.assertEqual(set((await self.crictl("pods", "-q", *words)).split()), expected, words)

    async def test_containers_are_filtered(self) -> None:
        await self.start()
        pod = self.pod_file()
        sandbox = await self.crictl("runp", pod)
        other_pod = self.pod_file("other")
        other = await self.crictl("runp", other_pod)
        main = await self.box_in(sandbox, pod, self.box_file("main", labels={"part": "main"}))
        ended = await self.box_in(sandbox, pod, self.box_file("ended", script="exit 3"))
        made = await self.crictl("create", other, self.box_file("made", labels={"part": "made"}), other_pod)
        await self.until_exited(ended)
        for words, expected in (
            ((), {main}),
            (("-a",), {main, ended, made}),
            (("-a", "--name", "made"), {made}),
            (("--state", "running"), {main}),
            (("-a", "--state", "exited"), {ended}),
            (("-a", "--state", "created"), {made}),
            (("-a", "--pod", sandbox), {main, ended}),
            (("-a", "--pod", other[:13]), {made}),
            (("-a", "--label", "part=made"), {made}),
            (("-a", "--id", ended), {ended}),
            (("-a", "--id", ended[:13]), {ended}),
            (("-a", "--image", self.image), {main, ended, made}),
            (("-a", "--id", UNKNOWN), set()),
        ):
            self.assertEqual(set((await self.crictl("ps", "-q", *words)).split()), expected, words)
        self.assertEqual(len((await self.crictl("inspect", main[:13])).strip()) > 100, True)

    async def until_exited(self, container: str) -> None:
        for _ in range(100):
            status = (await self.json("inspect", container))["status"]
            if status["state"] == "CONTAINER_EXITED":
                self.assertEqual((status["exitCode"], status["reason"]), (3, "Error"))
                return
            await self.sleep(0.1)
        self.fail("it does not end")


@needs_tools("crictl")
class ImageTests(CrictlCase):
    async def test_the_life_of_an_image(self) -> None:
        registry = await deferToThread(Registry().start)
        try:
            await self.images_come_and_go(registry)
        finally:
            await deferToThread(registry.stop)

    async def images_come_and_go(self, registry: Registry) -> None:
        built = busybox(config={"User": "1000"}, extra={"etc/motd": b"hello"})
        reference = await deferToThread(registry.push, "tools", "v1", built)
        await deferToThread(registry.push, "tools", "v2", built)
        self.config["images"] = {"insecure_registries": [registry.host]}
        await self.start()
        before = {each["id"] for each in (await self.json("images"))["images"]}

        self.assertIn("Image is up to date", await self.crictl("pull", reference))
        await self.crictl("pull", reference)
        [image] = [each for each in (await self.json("images"))["images"] if each["id"] not in before]
        self.assertEqual((image["id"], image["repoTags"]), (built.id, [reference]))
        digest = f"{registry.host}/tools@{built.manifest.digest}"
        self.assertEqual(image["repoDigests"], [digest])
        self.assertGreater(int(image["size"]), 100_000)
        self.assertEqual(image["uid"], {"value": "1000"})

        for name in (reference, digest, built.id, built.id.removeprefix("sha256:")[:13]):
            status = (await self.json("inspecti", name))["status"]
            self.assertEqual(status["id"], built.id, name)
        self.assertEqual(await self.crictl("images", "-q", reference), built.id)
        await self.crictl("pull", f"{registry.host}/tools:v2")
        status = (await self.json("inspecti", built.id))["status"]
        self.assertEqual(sorted(status["repoTags"]), [reference, f"{registry.host}/tools:v2"])

        usage = await self.json("imagefsinfo")
        self.assertTrue(usage["status"]["imageFilesystems"], usage)
        self.assertIn("Deleted", await self.crictl("rmi", built.id))
        self.assertEqual({each["id"] for each in (await self.json("images"))["images"]}, before)
        self.assertIn("no such image", (await self.fails("inspecti", reference)).lower())
        self.assertNotIn("Deleted", (await self.ran("rmi", reference)).stdout)

    async def test_what_can_not_be_pulled_is_said(self) -> None:
        await self.start()
        self.assertRegex(await self.fails("pull", "UPPER:CASE"), r"(?i)reference")
        said = await self.fails("pull", "127.0.0.1:1/nothing:1")
        self.assertIn("127.0.0.1:1/nothing", said)


@needs_tools("crictl")
class ErrorTests(CrictlCase):
    async def test_what_is_unknown_is_not_found_and_its_end_is_fine(self) -> None:
        await self.start()
        for words in (
            ("inspectp", UNKNOWN),
            ("inspect", UNKNOWN),
            ("start", UNKNOWN),
            ("exec", "-s", UNKNOWN, "true"),
            ("update", "--cpu-share", "2", UNKNOWN),
            ("logs", UNKNOWN),
            ("create", UNKNOWN, self.box_file(), self.pod_file()),
        ):
            said = await self.fails(*words)
            self.assertRegex(said, r"(?i)not ?found|there is no|no such|no (sandbox|container)", words)
            self.assertIn(UNKNOWN, said, words)

    async def test_what_is_wrong_is_named(self) -> None:
        await self.start()
        self.assertIn("name", await self.fails("runp", self.file({"metadata": {"uid": "u"}})))
        pod = self.pod_file()
        self.assertIn("handler", await self.fails("runp", "--runtime", "kata", pod))
        sandbox = await self.crictl("runp", pod)
        nothing = self.box_file(image={"image": "nothing:1"})
        self.assertIn("nothing:1", await self.fails("create", "--no-pull", sandbox, nothing, pod))
        container = await self.crictl("create", sandbox, self.box_file(command=["/no/such/program"]), pod)
        self.assertIn("/no/such/program", await self.fails("start", container))
        status = (await self.json("inspect", container))["status"]
        self.assertEqual((status["state"], status["exitCode"]), ("CONTAINER_EXITED", 127))

    async def test_a_vm_that_does_not_come_up_is_said_and_leaves_nothing(self) -> None:
        await self.start()
        fails = {"simulated.infranetes.io/behaviour": "fails"}
        said = await self.fails("runp", self.pod_file(annotations=fails))
        self.assertIn("this launch fails because the pod's annotation", said)
        self.assertEqual((await self.json("pods"))["items"], [])
        await self.until_no_vms()
        self.assertTrue(re.fullmatch(r"[0-9a-f]{32}", await self.crictl("runp", self.pod_file("next"))))

    async def until_no_vms(self) -> None:
        for _ in range(100):
            if not await self.vms():
                return
            await self.sleep(0.1)
        self.fail("a VM remains")
