# SPDX-License-Identifier: Apache-2.0
"""Pods on real VMs, from the CRI's socket to the container and back.

With the disks of images' layers.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
from functools import partial
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.error import ProcessExitedAlready
from twisted.internet.protocol import ProcessProtocol
from twisted.internet.threads import deferToThread
from twisted.web.client import Agent, readBody

from infranetes.ctl.cli import DOWN
from infranetes.guest import shims
from infranetes.pods.vm.node_names import node_dns
from infranetes_common.wire import cri
from tests.e2e.pod_case import PodCase, providers
from tests.harness.durations import slow
from tests.infranetes.daemon.case import ROOT, images, reactor
from tests.infranetes.daemon.hostports import free_port, in_kernel
from tests.support.large_image import large
from tests.support.registry import Registry
from txgrpc import Code

CRICTL = ROOT / "build" / "tools" / "crictl"


class Listener(ProcessProtocol):
    """A running `crictl events`."""

    def __init__(self) -> None:
        self._out = b""
        self._ended: Deferred[None] = Deferred()

    def outReceived(self, data: bytes) -> None:
        self._out += data

    def processEnded(self, reason: Any) -> None:
        self._ended.callback(None)

    def told(self, container: str, kind: str) -> bool:
        """Return whether it has shown an event of this kind for the container."""
        decoder, text, at = json.JSONDecoder(), self._out.decode(), 0
        with contextlib.suppress(ValueError):  # the last event may not be complete yet
            while at < len(text):
                event, at = decoder.raw_decode(text, at)
                if (event["containerId"], event["containerEventType"]) == (container, kind):
                    return True
                at += len(text[at:]) - len(text[at:].lstrip())
        return False

    async def end(self) -> None:
        """End it. Idempotent."""
        transport: Any = self.transport
        with contextlib.suppress(ProcessExitedAlready):
            transport.signalProcess("INT")
        if not self._ended.called:
            await self._ended


LISTENS = "until netstat -ltn | grep -q :8080; do sleep 0.1; done"


class PodTests(PodCase):
    """Pods with the daemon as a process, QEMU, and the guest image's agent and ContainerProvider."""

    async def crictl(self, *words: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        endpoint = f"--runtime-endpoint=unix://{self.socket}"
        command = [str(CRICTL), endpoint, "--timeout=60s", *words]
        return await deferToThread(subprocess.run, command, input=stdin, capture_output=True, timeout=120)

    async def test_files_and_streams_reach_the_container_and_others_the_pods_address(self) -> None:
        await self.start()
        shared = cri.LinuxSandboxSecurityContext(namespace_options=cri.NamespaceOption(network=cri.NODE))
        linux = cri.LinuxPodSandboxConfig(security_context=shared)
        sandbox = await self.run_pod(linux=linux)
        server = "mkdir /www; echo Hello from the pod > /www/index.html; exec httpd -f -p 8080 -h /www"
        container = await self.run_container(sandbox, self.box(script=server))
        request = cri.PodSandboxStatusRequest(pod_sandbox_id=sandbox)
        status = (await self.runtime.PodSandboxStatus(request, timeout=10.0)).status
        self.assertIn(IPv4Address(status.network.ip), IPv4Network(self.network.subnet))
        await self.execute(container, "sh", "-c", LISTENS)
        page: Deferred[bytes] = Deferred.fromCoroutine(self.page(f"http://{status.network.ip}:8080/"))
        self.assertEqual(await page, b"Hello from the pod\n")
        await self.figures(sandbox, container)
        echoed = await self.crictl(
            "exec", "-i", container, "sh", "-c", "cat; exit 3", stdin=b"through and back"
        )
        self.assertEqual(echoed.stdout, b"through and back", echoed.stderr)
        self.assertIn(b"exit code 3", echoed.stderr)
        names = await self.execute(container, "sh", "-c", "hostname; grep nameserver /etc/resolv.conf")
        servers = [f"nameserver {server}" for server in node_dns().servers]
        self.assertEqual(names.stdout.decode().splitlines(), [socket.gethostname(), *servers])
        lost = await self.execute(container, "sh", "-c", "exit 4")
        self.assertEqual(lost.exit_code, 4)
        late = cri.ExecSyncRequest(container_id=container, cmd=["sleep", "100"], timeout=1)
        await self.refused(Code.DEADLINE_EXCEEDED, self.runtime.ExecSync(late, timeout=90.0))
        await self.check_files(sandbox)
        await self.check_job(sandbox)

    async def check_job(self, sandbox: str) -> None:
        """Check that the long log of a container that ends is whole, though its pod is stopped at once."""
        linux = cri.LinuxContainerConfig(
            resources=cri.LinuxContainerResources(cpuset_cpus="0", cpuset_mems="0")
        )
        container = await self.run_container(sandbox, self.box("job", "seq 1 60000", linux=linux))
        status = await self.in_state(container, cri.CONTAINER_EXITED)
        self.assertEqual(self.lines("job"), [str(number) for number in range(1, 60_001)])
        self.assertEqual((status.resources.linux.cpuset_cpus, status.message), ("0", ""))
        writer = await self.run_container(sandbox, self.box("writer", "seq 1 60000; exec sleep 1000"))
        log = self.log_directory / "web" / "writer.log"
        await self.until(lambda: log.stat().st_size > 0, "it writes")
        await self.runtime.StopContainer(cri.StopContainerRequest(container_id=writer), timeout=120.0)
        lines = self.lines("writer")
        await self.stop_pod(sandbox)
        self.assertEqual(self.lines("writer"), lines, "all was there when its end was told")

    async def check_files(self, sandbox: str) -> None:
        """Check that files of the node and limits reach a container, and its words and end the node."""
        files = Path(os.path.realpath(self.root)) / "kubelet"
        secret, message = files / "secret", files / "message"
        (secret / "..1").mkdir(parents=True)
        (secret / "..1" / "token").write_text("first")
        (secret / "..1" / "token").chmod(0o440)
        (secret / "..data").symlink_to("..1")
        (secret / "token").symlink_to("..data/token")
        message.write_text("")
        mounts = [
            cri.Mount(container_path="/secret", host_path=str(secret), readonly=True),
            cri.Mount(container_path="/message", host_path=str(message)),
        ]
        linux = cri.LinuxContainerConfig(
            resources=cri.LinuxContainerResources(memory_limit_in_bytes=64 << 20),
        )
        script = (
            "id -u; cat /secret/token; echo; until grep -q second /secret/token; do sleep 0.1; done;"
            " echo changed; echo last words > /message; exit 5"
        )
        container = await self.run_container(sandbox, self.box("files", script, mounts=mounts, linux=linux))
        await self.until(lambda: self.lines("files") == ["0", "first"], "the secret is read")
        looked = await self.execute(container, "sh", "-c", "echo x > /secret/y; ls -lL /secret/token")
        self.assertIn(b"-r--r-----", looked.stdout)
        self.assertIn(b"Read-only file system", looked.stderr)
        (secret / "..2").mkdir()
        (secret / "..2" / "token").write_text("second")
        (secret / "..next").symlink_to("..2")
        (secret / "..next").rename(secret / "..data")
        status = await self.in_state(container, cri.CONTAINER_EXITED)
        self.assertEqual((status.exit_code, status.reason), (5, "Error"))
        self.assertEqual(message.read_text(), "last words\n")
        self.assertEqual(self.lines("files"), ["0", "first", "changed"])
        self.assertEqual(status.resources.linux.memory_limit_in_bytes, 64 << 20)

    def secured(self, **fields: Any) -> Any:
        return cri.LinuxContainerConfig(security_context=cri.LinuxContainerSecurityContext(**fields))

    async def said(self, sandbox: str, name: str, script: str, **fields: Any) -> tuple[Any, list[str]]:
        """Run a container of a script to its end; return its status, and the lines that it wrote."""
        container = await self.run_container(sandbox, self.box(name, script=script, **fields))
        status = await self.in_state(container, cri.CONTAINER_EXITED)
        await self.runtime.StopContainer(cri.StopContainerRequest(container_id=container), timeout=60.0)
        return status, self.lines(name)

    async def test_what_a_pod_may_ask_of_its_machine(self) -> None:
        await self.start()
        port = free_port()
        sysctls = {"kernel.shm_rmid_forced": "1", "fs.mqueue.msg_max": "100"}
        sandbox = await self.run_pod(
            linux=cri.LinuxPodSandboxConfig(sysctls=sysctls),
            port_mappings=[cri.PortMapping(host_port=port, container_port=8080)],
        )
        script = (
            "mkdir /www; cd /proc/sys; cat kernel/shm_rmid_forced fs/mqueue/msg_max > /www/index.html;"
            "ip link add probe0 type dummy && ip link show probe0 >> /www/index.html;"
            "exec httpd -f -p 8080 -h /www"
        )
        linux = self.secured(privileged=True)
        linux.resources.memory_limit_in_bytes = 64 << 20
        main = await self.run_container(sandbox, self.box(script=script, linux=linux))
        inside = await self.execute(main, "sh", "-c", f"{LISTENS}; cat /www/index.html")
        self.assertRegex(inside.stdout.decode(), r"\A1\n100\n\d+: probe0")
        page: Deferred[bytes] = Deferred.fromCoroutine(self.page(f"http://127.0.0.1:{port}/"))
        self.assertEqual(await page, inside.stdout)
        more = cri.LinuxContainerResources(
            memory_limit_in_bytes=96 << 20, unified={"memory.high": "50331648"}
        )
        await self.runtime.UpdateContainerResources(
            cri.UpdateContainerResourcesRequest(container_id=main, linux=more), timeout=60.0
        )
        await self.machine(sandbox, main)
        limits = await self.execute(
            main, "sh", "-c", "cat /sys/fs/cgroup/memory.max /sys/fs/cgroup/memory.high"
        )
        self.assertEqual(limits.stdout.split(), [b"100663296", b"50331648"], limits.stderr)

        profile = self.root / "profile.json"
        rule = {"names": ["chmod", "fchmodat", "fchmodat2"], "action": "SCMP_ACT_ERRNO"}
        profile.write_text(json.dumps({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [rule]}))
        least = self.secured(
            run_as_user=cri.Int64Value(value=1000), supplemental_groups_policy=cri.Strict,
            supplemental_groups=[7], no_new_privs=True, readonly_rootfs=True,
            capabilities=cri.Capability(drop_capabilities=["ALL"]), masked_paths=["/proc/timer_list"],
            seccomp=cri.SecurityProfile(
                profile_type=cri.SecurityProfile.Localhost, localhost_ref=str(profile)
            ),
        )  # fmt: skip
        volume = cri.Mount(
            container_path="/image",
            image=cri.ImageSpec(image=self.image),
            image_sub_path="etc",
            readonly=True,
        )
        _, lines = await self.said(
            sandbox, "least", "exec 2>&1; id; grep -E 'CapBnd|NoNewPrivs|Seccomp:' /proc/self/status;"
            "ls /image; touch /x; chmod 700 /proc/self; head -c 1 /proc/timer_list | wc -c",
            linux=least, mounts=[volume],
        )  # fmt: skip
        self.assertEqual(lines[0], "uid=1000(app) gid=1000(app) groups=7,1000(app)")
        self.assertEqual(
            lines[1:6], ["CapBnd:\t0000000000000000", "NoNewPrivs:\t1", "Seccomp:\t2", "group", "passwd"]
        )
        self.assertIn("Read-only file system", lines[6])
        self.assertIn("Operation not permitted", lines[7])
        self.assertEqual(lines[8], "0")

        status, _ = await self.said(
            sandbox, "greedy", "dd if=/dev/zero of=/dev/null bs=100M",
            linux=cri.LinuxContainerConfig(
                resources=cri.LinuxContainerResources(memory_limit_in_bytes=16 << 20)
            ),
        )  # fmt: skip
        self.assertEqual((status.exit_code, status.reason), (137, "OOMKilled"))

        # With all privileges and no AppArmor, it ends what is its pod's, but not its agent.
        sharing = self.secured(privileged=True, namespace_options=cri.NamespaceOption(pid=cri.POD))
        _, lines = await self.said(
            sandbox, "ender", "kill -9 -1; ls /proc 2>/dev/null | grep -c '^[0-9]'", linux=sharing
        )
        self.assertLess(int(lines[0]), 7)
        await self.in_state(main, cri.CONTAINER_EXITED)
        _, lines = await self.said(sandbox, "next", "cat /proc/1/comm", linux=sharing)
        self.assertEqual(lines, ["catatonit"])
        await self.stop_pod(sandbox)
        self.assertEqual(in_kernel(self.root), "")

    async def machine(self, sandbox: str, first: str) -> None:
        """Check that the first container has the limits of a later one, and that the processes that keep the
        pod running are protected."""
        linux = self.secured(privileged=True, namespace_options=cri.NamespaceOption(pid=cri.NODE))
        later = await self.run_container(sandbox, self.box("later", "exec sleep 1000", linux=linux))
        limits = [
            (await self.execute(each, "cat", "/proc/self/limits", "/proc/self/oom_score_adj")).stdout
            for each in (first, later)
        ]
        self.assertIn(b"Max open files", limits[0])
        self.assertEqual(limits[0], limits[1])
        words = (await self.execute(later, "ps", "-o", "args")).stdout.decode()
        if providers(self.images)[:1] in ((), ("docker",)):  # Docker runs before the VM is a pod's
            await self.shims(later)
            daemons, count = "docker[d]|container[d]|vmserve[r]", 5  # agent, dockerd, containerd, its shims
        else:
            self.assertEqual(words.count("/conmon --cid="), 2, words)
            daemons, count = "/conmo[n] --cid|vmserve[r] --config", 3
        # When the machine's memory runs out, the processes that keep its pod running are not killed.
        look = (
            f"ps -o pid,args | grep -E '{daemons}' | while read pid _; do cat /proc/$pid/oom_score_adj; done"
        )
        scores = (
            await self.execute(later, "sh", "-c", f"cat /proc/self/oom_score_adj; {look}")
        ).stdout.split()
        self.assertEqual(scores[0], b"0")
        self.assertGreaterEqual(len(scores), 1 + count, scores)
        self.assertLessEqual(max(map(int, scores[1:])), -998, scores)

    async def shims(self, container: str) -> None:
        """Check that one of Docker's shims was kept ready, that the pod's init has it, and none is kept now.

        :param container: sees the VM's processes, and has a shim of its own, as the first container has."""
        ready = f"/proc/1/root{shims.DIRECTORY}/ready"
        seen = await self.execute(container, "sh", "-c", f"ps -o args; ls -d {ready}; ls {ready} | wc -l")
        words = seen.stdout.decode()
        self.assertEqual(len(re.findall(r"containerd-shim\S* .*-id spare-", words)), 1, words)
        self.assertEqual(len(re.findall(r"containerd-shim\S* .*-id [0-9a-f]{64}", words)), 2, words)
        self.assertTrue(words.endswith(f"{ready}\n0\n"), words)

    async def figures(self, sandbox: str, container: str) -> None:
        """Check the statistics that crictl shows of the pod and its container, from the VM's own kernel."""
        filled = "head -c 2000000 /dev/zero > /filled; while :; do :; done"
        listener = await self.listener()
        busy = await self.run_container(sandbox, self.box("busy", script=filled))
        await self.until(lambda: listener.told(busy, "CONTAINER_STARTED_EVENT"), "crictl events tells of it")
        await listener.end()
        until = reactor.seconds() + 300.0
        while True:
            stats = await self.shown("stats", "-o", "json")
            found = {one["attributes"]["id"]: one for one in stats["stats"]}
            written = found.get(busy, {}).get("writableLayer") or {"usedBytes": {"value": 0}}
            if int(written["usedBytes"]["value"]) > 2_000_000 and "usageNanoCores" in found[busy]["cpu"]:
                break
            self.assertLess(reactor.seconds(), until, str(stats))
            await self.sleep(1.0)
        self.assertEqual(set(found), {container, busy})
        self.assertGreater(int(found[busy]["cpu"]["usageNanoCores"]["value"]), 50_000_000)
        self.assertGreater(int(found[busy]["memory"]["workingSetBytes"]["value"]), 100_000)
        self.assertLess(int(found[busy]["memory"]["workingSetBytes"]["value"]), 64 << 20)
        (pod,) = (await self.shown("statsp", "-o", "json"))["stats"]
        linux = pod["linux"]
        self.assertGreater(int(linux["memory"]["workingSetBytes"]["value"]), 16 << 20)
        self.assertGreater(int(linux["network"]["defaultInterface"]["rxBytes"]["value"]), 100)
        self.assertGreaterEqual(int(linux["process"]["processCount"]["value"]), 2)
        (metrics,) = (await self.shown("metricsp"))["podMetrics"]
        self.assertEqual(len(metrics["containerMetrics"]), 2)
        names = {one["name"] for one in (*metrics["metrics"], *metrics["containerMetrics"][0]["metrics"])}
        for name in ("network_receive_bytes_total", "memory_cache", "cpu_cfs_periods_total", "processes"):
            self.assertIn(f"container_{name}", names)
        table = await self.crictl("stats")
        self.assertEqual(table.returncode, 0, table.stderr)
        remove = cri.RemoveContainerRequest(container_id=busy)
        await self.runtime.RemoveContainer(remove, timeout=90.0)

    async def shown(self, *words: str) -> Any:
        """Run crictl, and return its output, decoded from JSON."""
        done = await self.crictl(*words)
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads(done.stdout)

    async def listener(self) -> Listener:
        """Start `crictl events`."""
        listener = Listener()
        command = [str(CRICTL), f"--runtime-endpoint=unix://{self.socket}", "events"]
        reactor.spawnProcess(listener, command[0], command, env={})
        self.addCleanup(listener.end)
        await self.sleep(2.0)  # it does not report when it begins to listen
        return listener

    async def page(self, url: str) -> bytes:
        agent = Agent(reactor, connectTimeout=10)
        response = await agent.request(b"GET", url.encode())
        return await readBody(response)


class KilledDaemonTests(PodCase):
    """A pod whose daemon is killed while it runs."""

    def enter(self, *command: str, typed: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        """Run a command in the pod's VM."""
        program = [
            sys.executable,
            "-m",
            "infranetes.ctl.cli",
            "--config",
            str(self.root / "infranetes.toml"),
        ]
        return subprocess.run(
            [*program, "enter", "web", "--", *command],
            input=typed,
            capture_output=True,
            cwd=ROOT,
            timeout=120,
        )

    async def test_a_killed_daemon_changes_nothing_for_a_pod_and_ends_its_shell(self) -> None:
        self.config["images"] = {"preload": [(await images()).reference]}
        self.config["control"] = {"enter": True}
        await self.start()
        sandbox = await self.run_pod(hostname="web-0", labels={"app": "web"})
        script = "i=0; while true; do echo line $i; i=$((i+1)); sleep 0.2; done"
        container = await self.run_container(sandbox, self.box(script=script))
        before = await self.container_status(container)
        self.assertNotIn("loaded into sandbox", self.log)  # the template already has the image
        self.assertEqual(len(self.taps().splitlines()), 1)
        inside = "hostname; id -u; cat /proc/1/comm; systemctl is-active vmserver; cat; exit 3"
        done = await deferToThread(self.enter, "sh", "-c", inside, typed=b"typed")
        self.assertEqual(
            (done.stdout, done.returncode), (b"web-0\n0\nsystemd\nactive\ntyped", 3), done.stderr
        )
        sleeping = deferToThread(self.enter, "sh", "-c", "echo $$ >/run/entered; sleep 1000 & wait")
        there = (
            "p=$(cat /run/entered) && test -d /proc/$p || grep -sqxz '100[0]' /proc/[0-9]*/cmdline "
            "&& exit 10; exit 11"
        )
        while (await deferToThread(self.enter, "sh", "-c", there)).returncode != 10:
            self.assertTrue(self.alive)
        for _ in range(2):
            seen = len(self.lines("main"))
            await self.kill()
            await self.sleep(2.0)
            await self.start()
            await self.until(partial(self.has_lines, seen + 15), "the log goes on")
        ended = await sleeping
        self.assertEqual(ended.returncode, DOWN, ended.stderr)
        while (await deferToThread(self.enter, "sh", "-c", there)).returncode != 11:
            self.assertTrue(self.alive)
        self.assertEqual(
            [(each.id, each.state) for each in await self.sandboxes()], [(sandbox, cri.SANDBOX_READY)]
        )
        status = await self.container_status(container)
        self.assertEqual(
            (status.state, status.started_at, status.created_at),
            (cri.CONTAINER_RUNNING, before.started_at, before.created_at),
        )
        self.assertEqual((await self.execute(container, "hostname")).stdout, b"web-0\n")
        stop = cri.StopContainerRequest(container_id=container, timeout=0)
        await self.runtime.StopContainer(stop, timeout=90.0)
        lines = self.lines("main")
        self.assertEqual(lines, [f"line {number}" for number in range(len(lines))])
        self.assertEqual((await self.container_status(container)).exit_code, 137)
        await self.stop_pod(sandbox)
        self.assertEqual(self.taps(), "")
        await self.remove_pod(sandbox)
        self.assertEqual(await self.sandboxes(), [])


LARGE = (20, 40, 6)  # MiB that do not compress, MiB that do, and layers


@slow(60, "images of many layers are made and converted")
class OciTests(PodCase):
    """Pods on a node that runs containers with conmon and crun."""

    contprovider = "oci"
    sizes = ""  # the sizes of the pool's VMs

    def written(self) -> str:
        return super().written() + self.sizes

    async def end_everything(self) -> None:
        if self.sizes and self.alive:  # otherwise the pool's VMs would outlive the test
            self.sizes = ""
            await self.restart()
            pods = len(await self.sandboxes())
            await self.until(lambda: len(self.taps().splitlines()) == pods, "the pool's VMs have ended")
        await super().end_everything()

    async def set_up_large(self, *, preload: bool = False) -> None:
        """Start the daemon with an image of many layers on the node."""
        registry = await deferToThread(Registry().start)
        self.addCleanup(deferToThread, registry.stop)
        self.large = await deferToThread(registry.push, "large", "1", large(*LARGE))
        preloaded = [self.large] if preload else []
        self.config["images"] = {"insecure_registries": [registry.host], "preload": preloaded}
        await self.start()
        pull = cri.PullImageRequest(image=cri.ImageSpec(image=self.large))
        await self.image_service.PullImage(pull, timeout=300.0)

    def of_large(self, name: str, script: str, attempt: int = 0) -> Any:
        return self.box(name, script, attempt, image=cri.ImageSpec(image=self.large))

    def shown(self) -> set[str]:
        """Return the layers that QEMU has open."""
        found = set()
        for link in Path("/proc").glob("[0-9]*/fd/*"):
            try:
                target = os.readlink(link)
            except OSError:
                continue
            if target.startswith(f"{self.root}/state/images/disks/") and b"qemu" in self._command(link):
                found.add(Path(target).name.partition(".")[0])
        return found

    def _command(self, link: Path) -> bytes:
        try:
            return (link.parents[1] / "cmdline").read_bytes().split(b"\0")[0]
        except OSError:
            return b""

    async def test_a_vm_has_the_disks_of_preloaded_images_from_the_start(self) -> None:
        await self.set_up_large(preload=True)
        sandbox = await self.run_pod()
        self.assertEqual(len(self.shown()), 1 + LARGE[2])
        await self.run_container(sandbox, self.of_large("big", "cat /data/*/* | wc -c; exec sleep 1000"))
        await self.until(lambda: len(self.lines("big")) == 1, "the log of the large image")
        self.assertEqual(len(self.shown()), 1 + LARGE[2])

    async def test_a_vm_of_the_pool_has_run_a_container_and_shows_none_of_it(self) -> None:
        self.sizes = "\n[[pool.sizes]]\ncount = 1\n"
        await self.start()
        await self.until(lambda: "waits in the pool" in self.log, "a VM waits")
        sandbox = await self.run_pod()
        self.assertEqual(self.log.count("waits in the pool"), 1)
        main = await self.run_container(sandbox, self.box(script="echo hello; exec sleep 1000"))
        await self.until(lambda: self.lines("main") == ["hello"], "its log")
        answer = await self.runtime.ListContainers(cri.ListContainersRequest(), timeout=30.0)
        self.assertEqual([each.id for each in answer.containers], [main])

    async def test_the_next_daemon_goes_on_with_containers_of_two_images_and_unplugs_what_is_not_used(
        self,
    ) -> None:
        self.config["times"] = {"unused_images": 1.0}
        await self.set_up_large()
        sandbox = await self.run_pod(hostname="web-0")
        counting = "i=0; while true; do echo line $i; i=$((i+1)); sleep 0.2; done"
        main = await self.run_container(sandbox, self.box(script=counting))
        script = "cat /data/*/* | wc -c; echo over >/data/0/0; exec sleep 1000"
        big = await self.run_container(sandbox, self.of_large("big", script))
        self.assertNotIn("loaded into sandbox", self.log)  # as an archive
        await self.until(lambda: len(self.lines("big")) == 1, "the log of the large image")
        self.assertGreater(int(self.lines("big")[0]), (LARGE[0] + LARGE[1] - 1) << 20)
        self.assertEqual((await self.execute(main, "hostname")).stdout, b"web-0\n")
        self.assertEqual((await self.execute(big, "cat", "/data/0/0")).stdout, b"over\n")
        self.assertEqual((await self.execute(main, "sh", "-c", "exit 4")).exit_code, 4)
        beside = await self.run_container(sandbox, self.of_large("beside", "cat /data/0/0 | wc -c; exit 3"))
        status = await self.in_state(beside, cri.CONTAINER_EXITED)
        self.assertEqual(status.exit_code, 3)
        await self.until(lambda: len(self.lines("beside")) == 1, "the log of the third")
        self.assertGreater(int(self.lines("beside")[0]), 5)  # the image's file, not what `big` wrote
        self.assertEqual(len(self.shown()), 1 + LARGE[2])

        before = await self.container_status(main)
        seen = len(self.lines("main"))
        await self.restart()
        await self.until(partial(self.has_lines, seen + 15), "the log goes on")
        self.assertEqual((await self.container_status(main)).started_at, before.started_at)
        for each in (big, beside):
            await self.runtime.RemoveContainer(cri.RemoveContainerRequest(container_id=each), timeout=90.0)
        await self.until(lambda: len(self.shown()) == 1, "only busybox's layer is plugged in")
        again = await self.run_container(sandbox, self.of_large("big", "ls /data | wc -l", 1))
        await self.in_state(again, cri.CONTAINER_EXITED)
        await self.until(lambda: self.lines("big")[-1:] == [str(LARGE[2])], "the image is there again")
        stop = cri.StopContainerRequest(container_id=main, timeout=0)
        await self.runtime.StopContainer(stop, timeout=90.0)
        self.assertEqual((await self.container_status(main)).exit_code, 137)
        lines = self.lines("main")
        self.assertEqual(lines, [f"line {number}" for number in range(len(lines))])
        await self.stop_pod(sandbox)
        self.assertEqual((self.taps(), self.shown()), ("", set()))
