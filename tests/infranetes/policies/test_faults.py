# SPDX-License-Identifier: Apache-2.0
"""Whatever fails on the way to a pod's kernel, the pod finally has its policies and is never open before."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import time
from pathlib import Path
from typing import TypeVar, cast

import attrs
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from infranetes.kubernetes.api_server import ApiServer
from infranetes.pods.features import network_policies
from infranetes.pods.features.network_policies import PodFirewalls
from infranetes.pods.node.inventory import Sandbox
from infranetes.policies.cluster import ClusterPolicies
from infranetes.policies.interface import LocalPod
from infranetes_common.concurrency import Event, deferred, run_in_thread, start
from infranetes_common.errors import Unavailable
from infranetes_common.pod_firewall import PodFirewall
from infranetes_common.wire import cri
from tests.harness.durations import slow
from tests.harness.needs import needs_netns, repetitions
from tests.infranetes.kubernetes.api_server import Json
from tests.infranetes.kubernetes.faults import (
    COUNTS,
    HEAL_SECONDS,
    OF_SERVER,
    Bed,
    FaultCase,
    Step,
    reactor,
    thd_awaited,
)
from tests.infranetes.policies.objects import block, labelled, namespace, pod, pods, policy
from tests.support import pod_namespaces
from tests.support.pod_namespaces import Connection, Machine, connects, ip
from vmserver.firewall.firewall import TABLE, Firewall

T = TypeVar("T")
EXAMPLES = int(os.environ.get("INFRANETES_TEST_FAULTS") or repetitions(6, nightly=40))
POLICIES = "/apis/networking.k8s.io/v1/networkpolicies"
NAMESPACES = "/api/v1/namespaces"
PODS = "/api/v1/pods"
NODE, POD, PORT = "198.18.234.1", "198.18.234.2", 8000
ALLOWED_GATEWAY, ALLOWED = "198.18.235.1", "198.18.235.2"  # by a policy that always exists
OTHERS_GATEWAY, OTHERS = "198.18.236.1", "198.18.236.2"  # not allowed by any policy

ALWAYS = policy("always", ingress=[{"from": [block(f"{ALLOWED}/32")]}])
VARIANTS: list[Json] = [
    {"ingress": [{"from": [pods(app="a")]}]},
    {"ingress": [{"from": [{"namespaceSelector": labelled(team="x")}], "ports": [{"port": 80}]}]},
    {"egress": [], "policyTypes": ["Egress"]},
    {"selector": labelled(app="nobody"), "ingress": [{}]},
]
NAMES = st.sampled_from("ab")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("policy"), NAMES, st.integers(0, len(VARIANTS) - 1)),
        st.tuples(st.just("no policy"), NAMES),
        st.tuples(st.just("peer"), NAMES, st.integers(1, 3), st.sampled_from("ab")),
        st.tuples(st.just("team"), st.sampled_from(("x", "y"))),
        st.tuples(st.sampled_from(("refused", "cut off")), COUNTS),
        st.tuples(st.just("restore")),
        *OF_SERVER,
    ),
    min_size=3,
    max_size=12,
)


class FaultyFirewall(Firewall):
    """A pod's firewall. :ivar refused: how many of the next changes fail. :ivar cut_off: how many are
    made but reported as failed."""

    refused = cut_off = 0

    async def _apply(self, script: str) -> None:
        if self.refused:
            self.refused -= 1
            raise Unavailable("nft: Could not process rule: Cannot allocate memory")
        await super()._apply(script)
        if self.cut_off:
            self.cut_off -= 1
            raise Unavailable("nft took too long")


@attrs.define
class Described:
    """The part of a Sandbox that is used."""

    id: str
    config: cri.PodSandboxConfig
    pod: str = "ns/web"


WEB = Described(
    "sandbox-1",
    cri.PodSandboxConfig(metadata=cri.PodSandboxMetadata(name="web", namespace="ns", uid="web")),
)


class PodBed(Bed):
    """The API server, a daemon, and the pod's own firewall."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.objects: dict[tuple[str, str], Json] = {}  # by path and name
        self.put(NAMESPACES, namespace("ns"))
        self.put(POLICIES, ALWAYS)

    def thd_make_network(self) -> None:
        word = secrets.token_hex(4)
        self.pod = Machine(f"vp{word}", POD, NODE, "02:00:00:00:00:02")
        self.allowed = Machine(f"va{word}", ALLOWED, ALLOWED_GATEWAY, "02:00:00:00:00:03")
        self.others = Machine(f"vo{word}", OTHERS, OTHERS_GATEWAY, "02:00:00:00:00:04")
        for address, device in ((NODE, "vp"), (ALLOWED_GATEWAY, "va"), (OTHERS_GATEWAY, "vo")):
            ip("address", "add", f"{address}/24", "dev", f"{device}{word}")
        subprocess.run(["sysctl", "-qw", "net.ipv4.ip_forward=1"], check=True)
        self.firewall = FaultyFirewall(reactor, self.pod.name)

    def thd_remove_network(self) -> None:
        for each in (self.pod, self.allowed, self.others):
            each.end()

    # The daemon

    def start(self) -> None:
        self.policies = ClusterPolicies(reactor, ApiServer(reactor, self.kubeconfig))
        ready: Event[None] = Event()
        ready.succeed(None)
        self.firewalls = PodFirewalls(reactor, self.policies, self, lambda _: ready)
        self.policies.startService()
        self.firewalls.connected(cast(Sandbox, WEB))

    def stop(self) -> None:
        start(self.firewalls.stop())
        self.policies.stopService()

    @deferred
    async def enforce(self, sandbox: Sandbox, firewall: PodFirewall) -> None:
        await self.firewall.put(firewall, NODE)

    def survives_reboot(self, sandbox: Sandbox) -> bool:
        return False

    def restart_agent(self) -> None:
        self.firewall = FaultyFirewall(reactor, self.pod.name)
        start(self.firewalls.live(cast(Sandbox, WEB)))

    # What users do in the cluster

    def put(self, path: str, item: Json) -> None:
        self.objects[path, item["metadata"]["name"]] = item
        self.server.put(path, item)

    def remove(self, path: str, name: str) -> None:
        item = self.objects.pop((path, name), None)
        if item is not None:
            self.server.remove(path, item)

    def restore(self) -> None:
        """Give the cluster another history with the same objects, as after a restore from a backup."""
        self.server.forget(bumped=True)
        for (path, _), item in self.objects.items():
            self.server.put(path, item)

    # What the result should be

    def thd_listed(self, namespace: str) -> str:
        """Return the nft tables of a namespace."""
        listed = ""
        for family in ("ip", "ip6"):
            command = ["ip", "netns", "exec", namespace, "nft", "--stateless", "list", "table", family, TABLE]
            listed += subprocess.run(command, capture_output=True, text=True, check=False).stdout
        return listed

    @deferred
    async def expected(self) -> PodFirewall:
        """Return the firewall according to a daemon that starts only now."""
        fresh = ClusterPolicies(reactor, ApiServer(reactor, self.kubeconfig))
        known: Event[None] = Event()
        fresh.subscribe(lambda ids: known.succeed(None))
        fresh.startService()
        fresh.add(LocalPod(WEB.id, "ns", "web", "web", {}))
        try:
            await known.wait()
            firewall = fresh.firewall(WEB.id)
            assert firewall is not None
            return firewall
        finally:
            fresh.stopService()


@needs_netns
class FaultTests(FaultCase[PodBed]):
    pausing = (network_policies,)

    def make_bed(self, directory: Path) -> PodBed:
        return PodBed(directory)

    @slow(6, "each example is judged by real packets")
    @deferred
    async def test_whatever_fails(self) -> None:
        await run_in_thread(reactor, self.thd_judge)

    def thd_judge(self) -> None:
        self.thd_wait_until_equal()
        bed = self.bed
        lasting = pod_namespaces.tcp(bed.allowed, bed.pod, PORT, True)
        assert lasting is not None
        with bed.pod.socket(socket.SOCK_STREAM) as listening:
            listening.bind(("0.0.0.0", PORT))
            listening.listen(100)
            self.thd_try_all(lasting)

    def thd_try_all(self, lasting: Connection) -> None:
        @settings(max_examples=EXAMPLES, phases=(Phase.explicit, Phase.generate), deadline=None)
        @given(STEPS)
        def thd_try(steps: list[Step]) -> None:
            for step in steps:
                self.thd_do(step)
                open_ = connects(self.bed.others, POD, PORT, 0.05)
                self.assertFalse(open_, f"after {step} of {steps} anybody may connect")
            self.thd_heal()
            self.thd_wait_until_equal()
            self.assertTrue(lasting.carries(True) and lasting.carries(True, back=True), f"{steps} cut it")
            self.assertTrue(connects(self.bed.allowed, POD, PORT, 20))

        try:
            thd_try()
        finally:
            lasting.end()

    async def mend(self) -> None:
        await self.bed.firewall.mend()

    def do(self, step: Step) -> None:
        bed = self.bed
        match step:
            case ("policy", str(name), int(variant)):
                bed.put(POLICIES, policy(name, **VARIANTS[variant]))
            case ("no policy", str(name)):
                bed.remove(POLICIES, name)
            case ("peer", str(name), int(number), str(app)):
                bed.put(PODS, pod(name, f"10.0.0.{number}", labels={"app": app}))
            case ("team", str(team)):
                bed.put(NAMESPACES, namespace("ns", team=team))
            case ("refused", int(count)):
                bed.firewall.refused = count
            case ("cut off", int(count)):
                bed.firewall.cut_off = count
            case ("restore",):
                bed.restore()
            case _:
                super().do(step)

    def heal(self) -> None:
        super().heal()
        self.bed.firewall.refused = self.bed.firewall.cut_off = 0

    def thd_wait_until_equal(self) -> None:
        """:raise AssertionError: the pod's kernel does not reach the expected state in time."""
        until = time.monotonic() + HEAL_SECONDS
        bed = self.bed
        expected = thd_awaited(bed.expected)
        fresh = Firewall(reactor, bed.others.name)
        thd_awaited(lambda: start(fresh.put(expected, NODE)))
        wanted = bed.thd_listed(bed.others.name)
        for family in ("ip", "ip6"):
            ip("netns", "exec", bed.others.name, "nft", "delete", "table", family, TABLE)
        while bed.thd_listed(bed.pod.name) != wanted or bed.firewalls.in_force(WEB.id) != expected:
            if time.monotonic() > until:
                self.fail(f"there is {expected}, not {bed.firewalls.in_force(WEB.id)}")
            time.sleep(0.01)
