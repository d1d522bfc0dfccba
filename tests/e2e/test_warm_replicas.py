# SPDX-License-Identifier: Apache-2.0
"""Pods that start from one that was kept, in real VMs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from infranetes_common.wire import cri
from tests.e2e.counting_case import COUNTER, CountingCase
from tests.infranetes.daemon.ctl import CtlCase

_START_FROM = {"infranetes.io/start-from": "warm"}
_DEPLOYMENT = {
    **_START_FROM,
    "infranetes.io/keep-as": "warm",
    "infranetes.io/keep-after": "2",
    "infranetes.io/before-keep": "SIGUSR1",
    "infranetes.io/after-clone": '{"main": ["sh", "-c", "echo cloned >/cloned"]}',
}


class WarmReplicaTests(CountingCase, CtlCase):
    """Keeping and starting with the daemon as a process, QEMU and the guest image's agent."""

    async def started(self, name: str, script: str = COUNTER) -> tuple[str, str, int]:
        """Run a pod from the state; return it, its container and how far that has counted."""
        sandbox = await self.run_pod(name, annotations=_START_FROM)
        container = await self.run_container(sandbox, self.box(script=script))
        return sandbox, container, await self.count(container)

    async def test_replicas_go_on_from_where_the_first_one_was_kept(self) -> None:
        await self.start()
        first = await self.run_pod("web-0")
        container = await self.run_container(first, self.box(script=COUNTER))
        while await self.count(container) < 200:
            pass
        print(await self.ctl("keep", "default/web-0", "--as", "warm"), flush=True)
        kept = await self.count(container)
        one, its, reached = await self.started("web-1")
        self.assertGreaterEqual(reached, 200)
        await self.goes_on(its, reached)
        await self.goes_on(container, kept)
        await self.kill()
        await self.start()
        await self.goes_on(its, reached)
        other, its, reached = await self.started("web-2")
        self.assertGreaterEqual(reached, 200)
        states = {one: cri.CONTAINER_RUNNING, other: cri.CONTAINER_RUNNING}
        for sandbox, state in states.items():
            request = cri.ListContainersRequest(filter=cri.ContainerFilter(pod_sandbox_id=sandbox))
            [listed] = (await self.runtime.ListContainers(request, timeout=30.0)).containers
            self.assertEqual((listed.metadata.name, listed.state), ("main", state))
        _, _, reached = await self.started("web-3", f"true; {COUNTER}")
        self.assertLess(reached, 200, "another command starts cold")
        print(await self.ctl("kept"), await self.ctl("describe", one), flush=True)
        await self.ctl("kept", "remove", "default/warm")
        await self.goes_on(its, 200)
        for sandbox in (first, one, other):
            await self.stop_pod(sandbox)
            await self.remove_pod(sandbox)

    def with_secret(self, name: str) -> Any:
        """Return a container that counts, with a secret of its pod's own."""
        secret = self.root / "kubelet" / "pods" / name / "volumes" / "kubernetes.io~secret" / "key"
        secret.mkdir(parents=True)
        (secret / "password").write_text(f"the secret of {name}")
        mount = cri.Mount(container_path="/secret", host_path=str(secret), readonly=True)
        return self.box(script=f"trap 'echo told >/told' USR1; {COUNTER}", mounts=[mount])

    async def said(self, container: str, *command: str) -> str:
        ran = await self.execute(container, *command)
        self.assertEqual(ran.exit_code, 0, ran.stderr)
        return bytes(ran.stdout).decode().strip()

    async def replica(self, name: str) -> str:
        """Run a pod with annotations as a Deployment's template has them; return its container."""
        sandbox = await self.run_pod(name, annotations=_DEPLOYMENT, hostname=f"host-{name}")
        container = await self.run_container(sandbox, self.with_secret(name))
        self.assertEqual(await self.said(container, "cat", "/secret/password"), f"the secret of {name}")
        self.assertEqual(await self.said(container, "hostname"), f"host-{name}")
        return container

    async def test_the_first_of_a_deployment_is_kept_by_itself_and_none_has_anothers_secrets(self) -> None:
        self.config["times"] = {"sweep": 2.0}
        await self.start()
        first = await self.replica("web-0")
        states = Path(self.config["state_dir"], "kept", "states")
        await self.until(lambda: list(states.glob("*/state.json")), "the first one is kept", 300.0)
        for path in states.rglob("*"):
            if path.is_file():
                self.assertNotIn(b"the secret of web-0", path.read_bytes(), path)
        self.assertEqual(await self.said(first, "cat", "/secret/password"), "the secret of web-0")
        self.assertEqual(await self.said(first, "cat", "/told"), "told")
        reached = await self.count(first)
        others = [await self.replica(name) for name in ("web-1", "web-2")]
        for container in others:
            self.assertEqual(await self.said(container, "cat", "/told", "/cloned"), "told\ncloned")
            await self.goes_on(container, 20)
        await self.goes_on(first, reached)
        uuids = {await self.said(each, "cat", "/proc/sys/kernel/random/uuid") for each in (first, *others)}
        self.assertEqual(len(uuids), 3)
        await self.sleep(5.0)
        self.assertEqual(len(list(states.iterdir())), 1, "it is kept once")
