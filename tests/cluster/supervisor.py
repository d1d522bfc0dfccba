# SPDX-License-Identifier: Apache-2.0
"""Starts the cluster's programs one after another, and watches over them. It runs on the first node."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType

import attrs

from infranetes_common.concurrency import replace_file
from tests.cluster import cgroups, components, containerd, images, neighbour, storage, world
from tests.cluster.components import Program
from tests.cluster.nodes import Node
from tests.cluster.paths import PROGRAMS, REGISTRY, ROOT, Paths
from tests.cluster.pki import Authority

READY_SECONDS = 120.0
TEMPLATE_SECONDS = 900.0  # for the first start, which makes QEMU's template
RESTART_SECONDS = 1.0  # as in debian/infranetes.service
LOOK_SECONDS = 0.1


class Ended(Exception):
    """A program of the cluster ended, or was not ready in time. The message has the end of its log."""


@attrs.define
class _Running:
    program: Program
    process: subprocess.Popen[bytes]
    due: float = 0.0  # when it is started again


class Supervisor:
    """The programs of one cluster."""

    def __init__(self, paths: Paths, given: argparse.Namespace) -> None:
        self.paths = paths
        self.place = paths.place
        self.nodes = [Node(paths, number) for number in range(1, given.nodes + 1)]
        self.image_dir: Path = given.image_dir
        self.with_proxy: bool = given.proxy
        self.with_policies: bool = given.policies
        self.with_storage: bool = given.storage
        self.with_pinning: bool = given.pinning
        self.with_ssh: bool = given.ssh
        self.runtime: str = given.runtime
        with_containerd = self.runtime in (components.CONTAINERD, components.MIXED)
        self.containerd = containerd.Node(self.place) if with_containerd else None
        qemu = (
            {} if given.accelerator == "auto" else {"providers": {"qemu": {"accelerator": given.accelerator}}}
        )
        self.changes: dict[str, object] = {**components.provider(given.provider, paths.id), **qemu}
        if self.containerd and self.runtime == components.MIXED:
            self.changes |= components.beside(self.containerd.socket)
        self._running: dict[str, _Running] = {}
        self._begun = time.monotonic()
        self._told = False
        self._ready = False

    def run(self) -> None:
        """Start everything, then watch until a signal comes. :raise Ended: a program has failed."""
        for directory in (self.paths.shared, self.place / "tmp", self.paths.logs):
            directory.mkdir(parents=True, exist_ok=True)
        self.paths.pid("supervisor").write_text(str(os.getpid()))
        first, *others = self.nodes
        for node in others:  # while this process still has the machine's mounts
            self._start(neighbour.program(node, self.image_dir))
            self._until(partial(neighbour.ready, node), f"{node.name} has its namespaces")
        world.enter(first, self.image_dir)
        for node in others:
            neighbour.join(node)
        registry = images.serve(REGISTRY, self.place / "registry")
        try:
            self._start_all()
            self._ready = True
            self._tell()
            while True:
                self._look()
                time.sleep(LOOK_SECONDS)
        finally:
            registry.stop_process()
            if self.containerd:
                self.containerd.end()

    def _start_all(self) -> None:
        ca = Authority(self.place / "pki")
        admin = ca.kubeconfig("admin", components.API_SERVER, ["system:masters"])
        if self.containerd:
            self._start(self.containerd.program())
        if self.with_vms:
            about: dict[str, object] = {"network_policies": self.with_policies}
            if len(self.nodes) > 1:
                about["cluster_cidrs"] = [components.PODS, components.SERVICES]
            for node in self.nodes:
                self._start(components.daemon(ca, node, about, self.changes), node)
        self._start(components.etcd(self.place))
        self._until(lambda: _answers(f"{components.ETCD}/health"), "etcd answers")
        self._start(components.api_server(ca))
        trusted = ssl.create_default_context(cafile=str(ca.certificate))
        trusted.load_cert_chain(ca.directory / "admin.crt", ca.directory / "admin.key")
        self._until(lambda: _answers(f"{components.API_SERVER}/readyz", trusted), "the API server is ready")
        self._prepare_services()
        self._start(components.controller_manager(ca))
        self._start(components.scheduler(ca))
        self._start(components.dns(self.place, admin))
        self._start(components.logind(self.paths))
        self._until(self.paths.inhibitors.exists, "the machine can be switched off")
        self._start_nodes(ca)
        if self.with_storage:
            self._start_storage(ca)
        if self.with_ssh:
            self._start(components.sshd(self.paths))
        if self.with_policies and self.with_vms:
            self._until(self._policies_known, "NetworkPolicies are known")
        self._until(lambda: _answers("http://127.0.0.1:8181/ready"), "DNS answers")
        pods = ("get", "serviceaccount", "default")
        self._until(lambda: self._kubectl(*pods).returncode == 0, "pods may be made")

    def _start_nodes(self, ca: Authority) -> None:
        proxy_user = ca.kubeconfig("system:kube-proxy", components.API_SERVER)
        for node in self.nodes:
            ready = partial(self._runtime_ready, node)
            self._until(ready, f"kubelet's runtime is ready on {node.name}", TEMPLATE_SECONDS)
            cgroup = node.cgroup if cgroups.make(node.cgroup) else ""
            pinning = components.PINNING if self.with_pinning else {}
            self._start(components.kubelet(ca, node, cgroup, self._socket, pinning), node)
            if self.with_proxy:
                self._start(components.proxy(proxy_user, node), node)
        for node in self.nodes:
            self._until(partial(self._node_ready, node), f"{node.name} is ready")
            if self.runtime == components.INFRANETES:
                self._until(partial(self._has_subnet, node), f"pods have the subnet of {node.name}")
        if self.runtime == components.MIXED:
            for node in self.nodes:
                label = ("label", "--overwrite", "node", node.name, "infranetes.io/vms=true")
                self._until(partial(self._done, *label), f"{node.name} may have VMs")
        neighbour.lead({node: self._asked(node, "{.spec.podCIDR}") for node in self.nodes})

    def _start_storage(self, ca: Authority) -> None:
        """Start the programs that make volumes for claims, beside kubelet."""
        self._apply("storage", storage.manifests(self.nodes[0]), "there is a StorageClass")
        for program in storage.programs(ca, self.nodes[0]):
            self._start(program)

    def _prepare_services(self) -> None:
        """Apply the docs' manifests (nodes' rights, RuntimeClasses), and give DNS its address."""
        self._apply("services", components.rights("services.md"), "nodes may see Services")
        if self.with_policies:
            self._apply("policies", components.rights("network-policy.md"), "nodes may see NetworkPolicies")
        if self.runtime == components.MIXED:
            pages = components.rights("runtime-classes.md", 2)
            self._apply("runtime-classes", pages, "there is a RuntimeClass")
            everywhere = json.dumps(components.vms_by_default())
            self._apply("vms-by-default", everywhere, "pods are VMs unless they say otherwise")
        items = {"apiVersion": "v1", "kind": "List", "items": components.dns_service()}
        self._apply("dns-service", json.dumps(items), "DNS has its address")

    def _apply(self, name: str, manifests: str, what: str) -> None:
        path = self.place / f"{name}.yaml"
        path.write_text(manifests)
        self._until(lambda: self._kubectl("apply", "-f", str(path)).returncode == 0, what)

    def _tell(self) -> None:
        sudo = "sudo " if os.environ.get("SUDO_USER") else ""
        kubectl, inside = f"{sudo}{self.paths.kubectl}", f"{sudo}{self.paths.inside}"
        say(f"""
The cluster is ready ({time.monotonic() - self._begun:.0f} s). In another terminal:

    {kubectl} get nodes,pods --all-namespaces
    {kubectl} run hello --image=busybox --restart=Never --attach -- echo hello
    {inside} infranetes-ctl pods
{self._tell_others(sudo)}
Images are busybox and debian. Logs are in {self.paths.logs}.
Ctrl-C ends the cluster and leaves nothing of it.""")

    def _tell_others(self, sudo: str) -> str:
        scripts = [self.paths.inside_of(node.name) for node in self.nodes if not node.first]
        return "".join(f"    {sudo}{script} infranetes-ctl pods\n" for script in scripts)

    # ---- processes

    def _start(self, program: Program, node: Node | None = None) -> None:
        """Start a program. `node`: where it runs, and which is part of its name; None: here."""
        if node is not None:
            name, command = node.process(program.name), node.command(program.command)
            program = attrs.evolve(program, name=name, command=command)
        search = (PROGRAMS, ROOT / "build" / "tools", Path(sys.executable).parent)
        environment = {
            **{name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")},
            "PATH": ":".join([*map(str, search), os.environ.get("PATH", ""), "/usr/sbin:/sbin"]),
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(self.place / "tmp"),
        }
        with (self.paths.logs / f"{program.name}.log").open("ab") as log:
            process = subprocess.Popen(
                program.command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,  # so that Ctrl-C does not reach it
            )  # fmt: skip
        replace_file(self.paths.pid(program.name), str(process.pid), durable=False)
        self._running[program.name] = _Running(program, process)

    def _look(self) -> None:
        """Start programs again that are to be restarted. :raise Ended: another program has ended."""
        now = time.monotonic()
        for running in list(self._running.values()):
            code = running.process.poll()
            if code is None:
                continue
            name = running.program.name
            if not running.program.restarted or not self._ready:
                log = self.paths.logs / f"{name}.log"
                said = log.read_text(errors="replace")[-2000:]
                raise Ended(f"{name} ended with {code}; its log is {log}:\n{said}")
            if self.paths.off.exists() or self.paths.stopped(name).exists():
                running.due = 0.0
            elif not running.due:
                running.due = now + RESTART_SECONDS
            elif now > running.due:
                self._start(running.program)

    def _until(self, holds: Callable[[], bool], what: str, seconds: float = READY_SECONDS) -> None:
        begun = time.monotonic()
        while not holds():
            self._look()
            if time.monotonic() > begun + seconds:
                raise Ended(f"not in {seconds:.0f} s: {what}; the logs are in {self.paths.logs}")
            time.sleep(LOOK_SECONDS)
        say(f"{time.monotonic() - self._begun:6.1f} s  {what}")

    # ---- questions

    @property
    def _socket(self) -> Path:
        if self.containerd and not self.with_vms:
            return self.containerd.socket
        return Path(components.SOCKET)

    @property
    def with_vms(self) -> bool:
        """Whether the cluster has our daemon."""
        return self.runtime != components.CONTAINERD

    def _runtime_ready(self, node: Node) -> bool:
        endpoint = f"--runtime-endpoint=unix://{self._socket}"
        crictl = [str(ROOT / "build" / "tools" / "crictl"), "--config", os.devnull, endpoint]
        done = subprocess.run(node.command([*crictl, "info"]), capture_output=True)
        if done.returncode:
            return False
        conditions = json.loads(done.stdout)["status"]["conditions"]
        waiting = next((each["message"] for each in conditions if not each["status"]), "")
        if "template" in waiting and not self._told:
            self._told = True
            say("          QEMU's template is being made, once for all clusters (one to three minutes)")
        return not waiting

    def _kubectl(self, *words: str) -> subprocess.CompletedProcess[bytes]:
        config = self.place / "pki" / "admin.conf"
        cache = f"--cache-dir={self.place / 'tmp' / 'kubectl'}"
        command = [str(PROGRAMS / "kubectl"), f"--kubeconfig={config}", cache, *words]
        return subprocess.run(command, capture_output=True)

    def _done(self, *words: str) -> bool:
        """Run kubectl, and return whether it succeeded."""
        return self._kubectl(*words).returncode == 0

    def _asked(self, node: Node, wanted: str) -> str:
        """Return what the API server knows about the node. `wanted` is a jsonpath of kubectl's."""
        return self._kubectl("get", "node", node.name, "--output", f"jsonpath={wanted}").stdout.decode()

    def _node_ready(self, node: Node) -> bool:
        wanted = '{.status.conditions[?(@.type=="Ready")].status}{.spec.taints}'
        return self._asked(node, wanted) == "True"

    def _has_subnet(self, node: Node) -> bool:
        """Return whether kubelet has told the daemon the subnet that the controller manager gave the node."""
        log = self.paths.logs / f"{node.process('infranetes')}.log"
        return "UpdateRuntimeConfig took" in log.read_text(errors="replace")

    def _policies_known(self) -> bool:
        """Return whether the daemon knows all policies, before which it starts no container."""
        command = [str(Path(sys.executable).with_name("infranetes-ctl")), "policies", "--json"]
        done = subprocess.run(command, capture_output=True)
        return done.returncode == 0 and bool(json.loads(done.stdout)["complete"])


def _answers(url: str, context: ssl.SSLContext | None = None) -> bool:
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if context is not None:
        handlers.append(urllib.request.HTTPSHandler(context=context))
    try:
        with urllib.request.build_opener(*handlers).open(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError, http.client.HTTPException):
        return False


def say(words: str) -> None:
    """Print `words`, unbuffered."""
    print(words, flush=True)


def _reap() -> None:
    """Go on in a child, because the first process of a PID namespace has to reap all orphans in it."""
    child = os.fork()
    if not child:
        return
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os.kill(child, signal.SIGTERM))
    while True:
        ended, status = os.wait()
        if ended == child:
            os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


def main(arguments: Sequence[str]) -> int:
    """Run the program, and return its exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("image_dir", type=Path)
    parser.add_argument("provider")
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--proxy", action="store_true")
    parser.add_argument("--policies", action="store_true")
    parser.add_argument("--storage", action="store_true")
    parser.add_argument("--pinning", action="store_true")
    parser.add_argument("--ssh", action="store_true")
    parser.add_argument("--runtime", required=True)
    parser.add_argument("--accelerator", required=True)
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, _end)
    _reap()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        Supervisor(Paths(given.name), given).run()
    except Ended as error:
        say(f"\nThe cluster has failed: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
