# SPDX-License-Identifier: Apache-2.0
"""What tests in the cluster share: the cluster, which the first of them starts, and kubectl."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from tests.cluster import images, logind
from tests.cluster.components import CONTAINERD, INFRANETES, MIXED
from tests.cluster.paths import ROOT, Paths

IMAGE_DIR = os.environ.get("INFRANETES_TEST_IMAGES", "/var/lib/infranetes/guest")
#: The runtime of the shared cluster's kubelet.
RUNTIME = os.environ.get("INFRANETES_TEST_RUNTIME") or INFRANETES
#: The cluster's options for each runtime; containerd's pods reach Services only through kube-proxy.
FLAGS = {INFRANETES: ("--policies",), MIXED: (), CONTAINERD: ("--proxy",)}
READY_SECONDS = 1500.0  # the image and the template may have to be made first
END_SECONDS = 60.0
WAIT_SECONDS = 240.0  # everything is slow without KVM, on a machine that is busy with other work
BUSYBOX = f"{images.PREFIX}/{images.BUSYBOX}"
DEBIAN = f"{images.PREFIX}/{images.DEBIAN}"
Manifest = dict[str, Any]


def until(holds: Callable[[], Any], what: str, seconds: float) -> Any:
    """Wait until `holds` returns something true; return that. :raise AssertionError: it takes too long."""
    deadline = time.monotonic() + seconds
    while not (answer := holds()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not in {seconds:.0f} s: {what}")
        time.sleep(0.1)
    return answer


class Cluster:
    """A cluster in a process of its own, which ends with this one."""

    def __init__(self, name: str, *flags: str) -> None:
        self.paths = Paths(name)
        self._flags = flags
        self._pid = 0
        self._output = self.paths.kept / "output"

    @property
    def output(self) -> str:
        """Return what its process has written so far."""
        return self._output.read_text(errors="replace")

    def start(self) -> Cluster:
        """Start the process, without waiting for anything."""
        pid_file = self._output.with_name("pid")
        pid_file.parent.mkdir(parents=True, exist_ok=True)
        pid_file.unlink(missing_ok=True)
        command = [
            *("setsid", "--fork", "sh", "-c", 'echo $$ >"$0"; exec "$@"', str(pid_file)),
            *(sys.executable, "-m", "tests.cluster", "--name", self.paths.name),
            *("--image-dir", IMAGE_DIR, "--until", str(os.getpid()), *self._flags),
        ]
        with self._output.open("wb") as output:
            subprocess.run(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=True
            )
        self._pid = int(
            until(lambda: pid_file.exists() and pid_file.read_text(), "the cluster is started", 10)
        )
        return self

    def alive(self) -> bool:
        return self._pid > 0 and Path(f"/proc/{self._pid}/exe").exists()

    def wait_until_ready(self) -> Cluster:
        """Wait until the cluster is ready. :raise AssertionError: it ended, or takes too long."""
        ready = "The cluster is ready"
        until(lambda: ready in self.output or not self.alive(), ready, READY_SECONDS)
        if not self.alive():
            raise AssertionError(f"the cluster ended:\n{self.output[-4000:]}")
        return self

    def signal(self, number: int) -> None:
        os.kill(self._pid, number)

    def wait_until_ended(self) -> None:
        until(lambda: not self.alive(), "the cluster has ended", END_SECONDS)

    def stop(self) -> None:
        """End it as a person does. Idempotent."""
        if self.alive():
            self.signal(signal.SIGTERM)
            self.wait_until_ended()

    # ---- inside of the cluster

    def kubectl(
        self, *words: str, given: bytes = b"", timeout: float = 120
    ) -> subprocess.CompletedProcess[bytes]:
        """Run kubectl. :param given: its standard input. :param timeout: in seconds."""
        command = [str(self.paths.kubectl), *words]
        return subprocess.run(command, input=given, capture_output=True, timeout=timeout)

    def inside(self, *words: str) -> str:
        """Run a command where the first node is, and return its standard output."""
        done = subprocess.run([str(self.paths.inside), *words], capture_output=True, text=True, timeout=120)
        if done.returncode:
            raise AssertionError(f"{' '.join(words)}: {done.stderr}{done.stdout}")
        return done.stdout

    def kill(self, *programs: str) -> None:
        """Send SIGKILL to these programs of the cluster, all at the same time."""
        self.inside("kill", "-KILL", *(self.paths.pid(each).read_text() for each in programs))

    def restart(self, *programs: str) -> None:
        """Kill these programs, which the supervisor starts again, and wait until it has."""
        before = {each: self.paths.pid(each).read_text() for each in programs}
        self.kill(*programs)
        for program, pid in before.items():
            until(partial(self._has_another, program, pid), f"{program} is back", 60)

    def _has_another(self, program: str, pid: str) -> bool:
        return self.paths.pid(program).read_text() not in ("", pid)

    def reboot(self) -> None:
        """Switch the first node's machine off and on; see `tests.cluster.reboot`."""
        self.paths.off.touch()
        try:
            self.inside(sys.executable, "-m", "tests.cluster.reboot", self.paths.name)
        finally:
            self.paths.off.unlink()

    def prepare_for_shutdown(self, off: bool) -> None:
        """Announce that the first node's machine is about to be switched off, or no longer is."""
        number = logind.OFF if off else logind.STAY
        self.inside("kill", f"-{number.value}", self.paths.pid("logind").read_text())

    def inhibitors(self) -> list[str]:
        """Return the holders of locks that keep the first node's machine from being switched off."""
        return self.paths.inhibitors.read_text().splitlines()

    def cri_answers(self) -> bool:
        """Return whether the daemon answers on its CRI socket."""
        with contextlib.suppress(AssertionError):
            return bool(self.inside("crictl", "version"))
        return False

    def kill_vm(self, namespace: str, name: str) -> None:
        """Kill the QEMU of a pod, behind the back of the daemon and kubelet."""
        listed = json.loads(self.inside("infranetes-ctl", "pods", "--json"))["pods"]
        (vm,) = [each["vm"] for each in listed if (each["namespace"], each["name"]) == (namespace, name)]
        token = vm["id"].removeprefix("qemu-")
        self.inside("pkill", "-KILL", "-f", f"guest=infranetes-{token}")

    def log(self, program: str) -> str:
        """Return the log of a program of the cluster."""
        return (self.paths.logs / f"{program}.log").read_text(errors="replace")


_shared: list[Cluster] = []


def shared() -> Cluster:
    """Return the cluster shared by all tests of this process that leave it as they found it."""
    if not _shared:
        cluster = Cluster("test", "--runtime", RUNTIME, *FLAGS[RUNTIME])
        atexit.register(cluster.stop)
        _shared.append(cluster.start())
    return _shared[0].wait_until_ready()


def container(name: str, script: str, **fields: Any) -> Manifest:
    """Return the manifest of a busybox container that runs a script."""
    return {"name": name, "image": BUSYBOX, "command": ["sh", "-c", script], **fields}


def pod(name: str, *containers: Manifest, **spec: Any) -> Manifest:
    """Return the manifest of a pod whose containers are not restarted, and which ends without grace."""
    spec = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 0, **spec}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {"containers": list(containers), **spec},
    }


def host_path(name: str, path: Path) -> Manifest:
    """Return a volume that is a directory of the node."""
    return {"name": name, "hostPath": {"path": str(path)}}


class ClusterCase(SynchronousTestCase):
    """A test case in which each test has a namespace of its own, which is deleted after it."""

    def running(self) -> Cluster:
        """Return the cluster that the test uses, running."""
        return shared()

    def setUp(self) -> None:
        self.cluster = self.running()
        self.namespace = f"test-{uuid.uuid4().hex[:8]}"
        self._log_start = 0 if RUNTIME == CONTAINERD else len(self.cluster.log("infranetes"))
        self.kubectl("create", "namespace", self.namespace)
        self.addCleanup(self.kubectl, "delete", "namespace", self.namespace, "--timeout=120s", timeout=150)
        account = ("get", "serviceaccount", "default", "--namespace", self.namespace)
        until(lambda: self.cluster.kubectl(*account).returncode == 0, "the namespace can have pods", 30)

    def directory(self) -> Path:
        """Make a new directory on the node, and return it."""
        self.cluster.paths.shared.mkdir(exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=self.cluster.paths.shared))
        made.chmod(0o777)
        return made

    # ---- kubectl

    def kubectl(self, *words: str, given: bytes = b"", timeout: float = 120) -> str:
        """Run kubectl, and return its standard output. :raise AssertionError: it failed."""
        done = self.cluster.kubectl(*words, given=given, timeout=timeout)
        if done.returncode:
            raise AssertionError(f"kubectl {' '.join(words)}: {done.stderr.decode()}{done.stdout.decode()}")
        return done.stdout.decode()

    def here(self, *words: str, **options: Any) -> str:
        """Run kubectl in the test's own namespace; see `kubectl`."""
        return self.kubectl("--namespace", self.namespace, *words, **options)

    def apply(self, *manifests: Manifest) -> None:
        document = {"apiVersion": "v1", "kind": "List", "items": list(manifests)}
        self.here("apply", "--filename", "-", given=json.dumps(document).encode())

    def get(self, *words: str) -> Any:
        return json.loads(self.here("get", *words, "--output", "json"))

    def wait(self, what: str, condition: str, seconds: float = WAIT_SECONDS) -> None:
        """Wait until `condition`, in the syntax of `kubectl wait --for`, holds for `what`."""
        words = ("wait", what, f"--for={condition}", f"--timeout={seconds:.0f}s")
        try:
            self.here(*words, timeout=seconds + 30)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.here('describe', what)[-3000:]}") from None

    def wait_for_phase(self, name: str, phase: str, seconds: float = WAIT_SECONDS) -> Manifest:
        """Wait until the pod is in that phase, and return the pod."""
        self.wait(f"pod/{name}", f"jsonpath={{.status.phase}}={phase}", seconds)
        found: Manifest = self.get("pod", name)
        return found

    def wait_until_ready(self, name: str, seconds: float = WAIT_SECONDS) -> Manifest:
        """Wait until the pod is ready, and return the pod."""
        self.wait(f"pod/{name}", "condition=Ready", seconds)
        found: Manifest = self.get("pod", name)
        return found

    def assert_same_run(self, before: Manifest) -> None:
        """Assert that the pod still has its address, and that its container `main` has run all the time."""
        after = self.get("pod", before["metadata"]["name"])
        self.assertEqual(after["status"]["podIP"], before["status"]["podIP"])
        status, first = states(after)["main"], states(before)["main"]
        self.assertEqual(
            (status["containerID"], status["restartCount"], status["state"]),
            (first["containerID"], 0, first["state"]),
        )

    def logs(self, name: str, *words: str) -> str:
        return self.here("logs", name, *words)

    def execute(self, name: str, *command: str, given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        """Run a command in a pod. It may have any exit code."""
        words = ("exec", "--stdin", name, "--", *command)
        return self.cluster.kubectl("--namespace", self.namespace, *words, given=given)

    # ---- the daemon's log

    def daemon_log(self) -> str:
        """Return what the daemon has logged since the test began."""
        return self.cluster.log("infranetes")[self._log_start :]


def states(found: Manifest, kind: str = "containerStatuses") -> Mapping[str, Manifest]:
    """Return the status of each container of a pod, by its name."""
    return {each["name"]: each for each in found["status"].get(kind, ())}


def reasons(found: Manifest, names: Sequence[str]) -> list[str]:
    """Return the reasons with which these containers have ended."""
    return [states(found)[name]["state"]["terminated"]["reason"] for name in names]
