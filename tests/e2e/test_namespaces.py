# SPDX-License-Identifier: Apache-2.0
"""Real VMs in pods' network namespaces: what a VM sends and receives passes through its pod's.

Namespaces as a CNI makes them, and those that Debian's containerd gives pods with the reference plug-ins.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import attrs
from twisted.trial.unittest import TestCase

from infranetes.delegate.channel import Delegate
from infranetes.delegate.hidden import SHADOW_OF
from infranetes.delegate.shadow import ShadowSandboxes
from infranetes.identity.authority import Authority
from infranetes.identity.node_addresses import sources
from infranetes.providers.interface import Attachment, Instance, ProviderContext, VmRequest
from infranetes_common.concurrency import run_in_thread
from infranetes_common.wire import cri
from tests.contract.pod_provider_case import reactor
from tests.e2e.namespace_case import MTU, ROUTE_MTU, NamespaceCase
from tests.e2e.qemu_case import QemuCase, said, without_agent_port
from tests.harness.durations import slow
from tests.infranetes.daemon.case import toml
from tests.interop.critest_images import PAUSE, REGISTRIES
from tests.interop.critest_runtimes import TWISTD, Containerd, Infranetes, Runtime, removed
from tests.support import oci
from tests.support.echo import answers
from tests.support.pod_namespaces import Machine, connects
from tests.support.registry import Registry

_OTHER_GATEWAY, _OTHER = "198.18.240.1", "198.18.240.2"
_AGENT, _CLOSED = 2475, 8000
_DOES_NOT = 3.0  # seconds within which even an emulated VM would have answered


class NamespaceTrafficTests(NamespaceCase, TestCase):
    """A VM sends and receives its pod's traffic."""

    def setUp(self) -> Any:
        made = super().setUp()
        self.authority = Authority(self.mktemp(), sources=sources(()))
        self.settings |= without_agent_port(self.open_dir)  # it is the TCP port that others may reach
        return made

    async def only_the_node_reaches_the_agent(self, instance: Instance) -> None:
        interface = f"out{secrets.token_hex(4)}"
        other = await run_in_thread(reactor, Machine, interface, _OTHER, _OTHER_GATEWAY, "02:00:00:00:00:03")
        self.addCleanup(other.end)
        said("ip", "address", "add", f"{_OTHER_GATEWAY}/24", "dev", interface)
        reached = [
            await run_in_thread(reactor, connects, other, instance.address, port, _DOES_NOT, True)
            for port in (_AGENT, _CLOSED)
        ]
        self.assertEqual(reached, [False, True])

    async def test_a_vm_is_its_pod_to_the_node(self) -> None:
        provider = await self.started()
        spec = self.spec()
        [pod] = self.pods
        instance: Instance = await self.running(provider, spec)
        self.assertEqual((instance.address, instance.agent_host), (pod.address, pod.address))
        self.assertEqual(instance.more_addresses, (pod.address6,))
        self.assertEqual((await self.agent_info(instance)).sandbox_id, spec.sandbox_id)
        await self.only_the_node_reaches_the_agent(instance)
        # Packets as large as the route allows, and with the other family as large as the link allows.
        self.assertTrue(await answers(reactor, pod.address, ROUTE_MTU - 28))
        self.assertTrue(await answers(reactor, pod.address6, MTU - 48))
        # The node's rules on its end of the link apply.
        chain = f'type filter hook input priority 0; iifname "{pod.link}" ip protocol icmp drop'
        script = f"table inet {pod.link} {{\nchain input {{\n{chain}\n}}\n}}\n"
        subprocess.run(["nft", "-f", "-"], input=script.encode(), check=True, capture_output=True)
        self.addCleanup(subprocess.run, ["nft", "delete", "table", "inet", pod.link], capture_output=True)
        self.assertTrue(await answers(reactor, pod.address6))
        self.assertFalse(await answers(reactor, pod.address, seconds=1.0))
        self.assertEqual((await self.agent_info(instance)).sandbox_id, spec.sandbox_id)
        said("nft", "delete", "table", "inet", pod.link)

        provider = await self.restarted(provider)
        addresses = [(each.address, each.more_addresses) for each in await provider.list()]
        self.assertEqual(addresses, [(pod.address, (pod.address6,))])
        self.assertTrue(await answers(reactor, pod.address))
        await self.within(provider.destroy(instance.id))
        self.assertEqual(pod.taps(), [])
        # The namespace serves another VM, as after a launch that failed.
        again = await self.running(
            provider, attrs.evolve(super().spec(), request=VmRequest(attachment=pod.attachment))
        )
        self.assertEqual((await self.agent_info(again)).sandbox_id, again.sandbox_id)


SUBNET, ROUTER = "10.228.0.0/24", "10.228.0.1"
_HOST_PORT = 32475
_MTU = 1430


class CniContainerd(Containerd):
    """A containerd whose pods' links are made by `plugin`, in a chain with further plug-ins."""

    subnet = SUBNET

    def __init__(self, root: Path, plugin: dict[str, Any]) -> None:
        super().__init__(root)
        self._plugin = plugin
        self._network_name = f"inf{secrets.token_hex(4)}"  # unique: rules may be left by a test

    def _network(self) -> dict[str, Any]:
        addresses = {
            "type": "host-local",
            "ranges": [[{"subnet": self.subnet}]],
            "routes": [{"dst": "0.0.0.0/0"}],
            "dataDir": str(self.root / "addresses"),
        }
        link = {"ipMasq": True, "ipam": addresses, "mtu": _MTU, **self._plugin}
        ports = {"type": "portmap", "capabilities": {"portMappings": True}}
        forwarded = {"type": "firewall"}  # needed where the machine drops forwarded packets, as with Docker
        return {"cniVersion": "1.0.0", "name": self._network_name, "plugins": [link, ports, forwarded]}

    def kill(self) -> None:
        """Kill the process. Another one may be started with the same pods."""
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        for made in ("hosts", "net.d"):  # the next start writes these again
            shutil.rmtree(self.root / made, ignore_errors=True)


class MixedNode(Infranetes):
    """This tree's daemon in front of a containerd, whose network its pods have."""

    def __init__(self, root: Path, table: Mapping[str, Any], delegate: Path) -> None:
        super().__init__(root, table)
        self._delegate = delegate

    def command(self, registry: Registry) -> tuple[list[str], Mapping[str, str]]:
        config = {
            "socket": self.endpoint,
            "state_dir": str(self.root / "state"),
            "run_dir": str(self.root / "run"),
            "node": "mixed",
            "cgroup_driver": "cgroupfs",
            "delegate": {"socket": str(self._delegate)},
            "handlers": {"vm": {"network": "cni"}},
            "providers": {"qemu": dict(self._table)},
        }
        path = self.root / "infranetes.toml"
        path.write_text(toml(config))
        return [*TWISTD, "--nodaemon", "--pidfile=", "infranetes", "--config", str(path)], {}


@slow(40, "containerd and its plug-ins take part, and VMs are emulated")
class CniTests(QemuCase, TestCase):
    """VMs in CNI networks, from the delegate's sandbox to the VM's end."""

    def setUp(self) -> Any:
        made = super().setUp()
        self.settings |= without_agent_port(self.open_dir)  # the CNI forwards a port to the agent's
        return made

    def context(self, cluster: str | None = None, node: str | None = None) -> ProviderContext:
        return attrs.evolve(super().context(cluster, node), joins_namespaces=True)

    def runtime_in(self, root: Path, plugin: dict[str, object]) -> CniContainerd:
        """Return the delegate, not started."""
        return CniContainerd(root, plugin)

    async def run_containerd(self, plugin: dict[str, Any]) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="cni-"))
        self.addCleanup(removed, self.root)
        self.addCleanup(self.end_shims)
        self.registry = Registry()
        self.addCleanup(self.registry.stop)
        self.containerd = self.runtime_in(self.root / "c", plugin)
        self.addCleanup(run_in_thread, reactor, self.containerd.end)
        await run_in_thread(reactor, self.registry.start)
        pause = await run_in_thread(reactor, oci.busybox, {"Cmd": ["sleep", "2147483647"]})
        await run_in_thread(reactor, self.registry.push, *PAUSE, pause)
        await run_in_thread(reactor, self.containerd.start, self.registry)
        self.delegate = Delegate(reactor, str(self.containerd.socket))
        self.addCleanup(self.delegate.stop)
        self.shadows = ShadowSandboxes(self.delegate, str(self.root))

    def end_shims(self) -> None:
        """End the shims of a containerd that was killed and not started again."""
        for arguments in (each / "cmdline" for each in Path("/proc").glob("[0-9]*")):
            with contextlib.suppress(OSError):
                if str(self.root).encode() in arguments.read_bytes():
                    os.kill(int(arguments.parent.name), signal.SIGKILL)

    def config(self) -> cri.PodSandboxConfig:
        uid = secrets.token_hex(8)
        mapped = cri.PortMapping(protocol=cri.TCP, container_port=_AGENT, host_port=_HOST_PORT)
        return cri.PodSandboxConfig(
            metadata=cri.PodSandboxMetadata(name="web", uid=uid, namespace="default"), port_mappings=[mapped]
        )

    async def while_killed(self, instance: Instance) -> None:
        """Check that the pod's traffic goes on while containerd does not run."""
        await run_in_thread(reactor, self.containerd.kill)
        self.assertEqual((await self.agent_info(instance)).sandbox_id, instance.sandbox_id)
        await run_in_thread(reactor, self.containerd.start, self.registry)

    async def lives(self) -> None:
        """Take a pod through its life, and check each part of it."""
        provider = await self.started()
        spec = self.spec()
        shadow = await self.shadows.run(self.config(), spec.sandbox_id)
        namespace = await self.shadows.namespace(shadow)
        joining = attrs.evolve(spec, request=VmRequest(attachment=Attachment(Path(namespace))))
        instance: Instance = await self.running(provider, joining)
        status = await self.delegate.call(
            "/runtime.v1.RuntimeService/PodSandboxStatus",
            cri.PodSandboxStatusRequest(pod_sandbox_id=shadow).SerializeToString(),
        )
        shown = cri.PodSandboxStatusResponse.FromString(status).status
        self.assertEqual(instance.address, shown.network.ip)
        self.assertEqual((await self.agent_info(instance)).sandbox_id, spec.sandbox_id)
        self.assertTrue(await answers(reactor, instance.address, _MTU - 28))
        # portmap forwards the node's port to the pod's address, which is now the VM's.
        mapped = attrs.evolve(instance, agent_host=ROUTER, agent_port=_HOST_PORT)
        self.assertEqual((await self.agent_info(mapped)).sandbox_id, spec.sandbox_id)

        await self.while_killed(instance)
        self.assertEqual((await self.agent_info(instance)).sandbox_id, spec.sandbox_id)
        self.assertEqual(await self.shadows.run(self.config(), spec.sandbox_id), shadow)
        self.assertEqual(await self.shadows.namespace(shadow), namespace)

        await self.within(provider.destroy(instance.id))
        await self.shadows.end(shadow)
        await self.shadows.end(shadow)
        self.assertEqual(await self.shadows.list(), [])
        self.assertFalse(Path(namespace).exists())

    async def test_of_a_bridge_with_ports(self) -> None:
        bridge = f"cni{secrets.token_hex(4)}"
        self.addCleanup(subprocess.run, ["ip", "link", "delete", bridge], capture_output=True)
        await self.run_containerd({"type": "bridge", "bridge": bridge, "isGateway": True})
        await self.lives()

    async def crictl(self, runtime: Runtime, *words: str) -> str:
        """Call a runtime by crictl, which has to succeed, and return the output."""
        done = await run_in_thread(reactor, lambda: runtime.crictl(*words))
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout.strip()

    async def test_pods_of_both_kinds_are_in_one_network(self) -> None:
        await self.run_containerd({"type": "ptp"})
        image = f"{REGISTRIES[0]}/box:1"
        await run_in_thread(
            reactor, self.registry.push, "box", "1", await run_in_thread(reactor, oci.busybox)
        )
        table = {key: value for key, value in self.settings.items() if key != "pod_cidr"}
        node = MixedNode(self.root / "d", table, self.containerd.socket)
        self.addCleanup(run_in_thread, reactor, node.end)
        await run_in_thread(reactor, node.start, self.registry)
        metadata = {"name": "web", "uid": "u1", "namespace": "default", "attempt": 0}
        pod, box = self.root / "pod.json", self.root / "box.json"
        pod.write_text(json.dumps({"metadata": metadata, "linux": {}, "log_directory": str(self.root)}))
        command = ["sh", "-c", "sleep 1000"]
        box.write_text(
            json.dumps(
                {"metadata": {"name": "box"}, "image": {"image": image}, "command": command, "linux": {}}
            )
        )
        await self.crictl(node, "pull", image)
        vm = await self.crictl(node, "runp", "--runtime", "vm", str(pod))
        address = json.loads(await self.crictl(node, "inspectp", vm))["status"]["network"]["ip"]
        self.assertIn(ip_address(address), ip_network(SUBNET))
        self.assertTrue(await answers(reactor, address))
        # The shadow sandbox is the delegate's, and the daemon does not list it.
        self.assertEqual(await self.crictl(node, "pods", "-q"), vm)
        shadow = await self.crictl(self.containerd, "pods", "-q", "--label", f"{SHADOW_OF}={vm}")
        self.assertEqual(len(shadow), 64)

        in_vm = await self.crictl(node, "create", vm, str(box), str(pod))
        await self.crictl(node, "start", in_vm)
        self.assertIn(
            "0% packet loss", await self.crictl(node, "exec", "--sync", in_vm, "ping", "-c1", ROUTER)
        )
        options = {"namespace_options": {"pid": int(cri.CONTAINER)}}  # as kubelet sends them
        linux = {"security_context": options}
        pod.write_text(json.dumps({"metadata": {**metadata, "name": "runc", "uid": "u2"}, "linux": linux}))
        ordinary = await self.crictl(node, "runp", str(pod))
        other = json.loads(await self.crictl(node, "inspectp", ordinary))["status"]["network"]["ip"]
        self.assertIn(
            "0% packet loss", await self.crictl(node, "exec", "--sync", in_vm, "ping", "-c1", other)
        )

        await self.crictl(node, "stopp", vm)
        await self.crictl(node, "rmp", vm)
        self.assertEqual(await self.crictl(self.containerd, "pods", "-q"), ordinary)
