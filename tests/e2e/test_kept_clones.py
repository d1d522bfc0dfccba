# SPDX-License-Identifier: Apache-2.0
"""VMs that start from one that was kept while its pod was held: each is another pod."""

from __future__ import annotations

import gzip
import re
import secrets
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.defer import gatherResults
from twisted.trial.unittest import TestCase

from infranetes.machines.agent.client import AgentClient
from infranetes.machines.keeping import Adoption, Hook
from infranetes.pods.images.layer_loads import disk_name
from infranetes.providers.interface import Instance, ReadOnlyDisk, ShownDisk, Size
from infranetes_common.concurrency import start
from infranetes_common.errors import FailedPrecondition
from infranetes_common.wire import cri, vmserver
from tests.contract.pod_provider_case import reactor
from tests.e2e.held_pod import HeldPodCase
from tests.e2e.taken_over import attack, states
from tests.harness.durations import slow
from tests.support.oci import busybox
from tests.vmserver.containers.oci.provider_case import file_system

KEPT_SECRET = secrets.token_hex(32).encode()
OLD, SECRET = "01d" * 10, "5ec" * 10
RANDOM = "cat /proc/sys/kernel/random/uuid; head -c 16 /dev/urandom | od -An -tx1"
SECONDS = 300.0
USUAL, LARGER = Size(), Size(cpu_millis=2000, memory_bytes=1536 << 20)


class KeptPodCase(HeldPodCase):
    """A pod that is kept while it is held."""

    layers: Path
    shown: Sequence[ShownDisk]

    async def kept(self, agent: AgentClient, instance: Instance) -> Path:
        """Keep the VM while its pod is held, and prepare it; return the directory."""
        provider: Any = self.providers[-1]
        directory = Path(tempfile.mkdtemp(prefix="infranetes-kept-"))
        self.addCleanup(shutil.rmtree, directory, ignore_errors=True)
        await agent.hold({}, {SECRET}, seconds=120.0)
        began = reactor.seconds()
        try:
            kept = await self.within(provider.keep(instance.id, directory, SECONDS), SECONDS + 5)
        finally:
            await self.put(agent, SECRET, KEPT_SECRET)
            await agent.release()
        print(f"kept in {reactor.seconds() - began:.2f} s, paused for {kept.pause_seconds:.2f} s", flush=True)
        began = reactor.seconds()
        await self.within(provider.prepare(directory, SECONDS), SECONDS + 5)
        sizes = {each.name[:20]: each.stat().st_blocks >> 11 for each in directory.iterdir()}
        print(f"prepared in {reactor.seconds() - began:.2f} s: {sizes} MiB", flush=True)
        for name in ("ram", "state"):
            self.assertNotIn(KEPT_SECRET, (directory / name).read_bytes())
        shutil.rmtree(self.layers)  # its image goes
        return directory

    async def load(self, agent: AgentClient) -> str:
        """Bring an image whose layers the VM is shown as disks."""
        [instance] = await self.providers[-1].list()
        provider: Any = self.providers[-1]
        built, self.layers = busybox(), Path(tempfile.mkdtemp(prefix="infranetes-layers-"))
        self.addCleanup(shutil.rmtree, self.layers, ignore_errors=True)
        disks = []
        for blob, diff_id in zip(built.layers, built.diff_ids, strict=True):
            disks.append(ReadOnlyDisk(disk_name(diff_id), self.layers / diff_id.rpartition(":")[2]))
            disks[-1].path.write_bytes(file_system(diff_id, gzip.decompress(blob.data)))
        self.shown = await provider.show_disks(instance.id, disks)
        layers = [
            vmserver.LayerDisk(diff_id=diff_id, target=disk.target, lun=disk.lun)
            for diff_id, disk in zip(built.diff_ids, self.shown, strict=True)
        ]
        await agent.add_image(built.id, built.config.data, layers)
        return built.id

    async def pod(self, size: Size = USUAL) -> tuple[Instance, AgentClient, str]:
        """Run a pod with the container; return it, its agent and its image."""
        provider = await self.started()
        spec = self.spec(size=size)
        instance = await self.running(provider, spec)
        await self.agent_info(instance)
        agent = AgentClient(spec.sandbox_id, self.channel(instance))
        image = await self.load(agent)
        sandbox = cri.PodSandboxConfig(hostname="pod")
        await agent.configure(sandbox, cri.DNSConfig())
        await self.put(agent, SECRET, KEPT_SECRET)
        await agent.create(OLD, image, self.config(SECRET, instance.address), sandbox)
        await agent.start(OLD)
        return instance, agent, image

    async def clone(self, directory: Path, size: Size = USUAL) -> tuple[Instance, AgentClient]:
        """Start a VM from the kept one; return it and its agent."""
        spec = attrs.evolve(self.spec(size=size), kept=directory)
        began = reactor.seconds()
        instance = await self.running(self.providers[-1], spec)
        print(f"a VM runs from the kept one after {reactor.seconds() - began:.2f} s", flush=True)
        self.assertEqual((await self.agent_info(instance)).sandbox_id, spec.sandbox_id)
        provider: Any = self.providers[-1]
        self.assertEqual(await provider.shown_disks(instance.id), self.shown)
        return instance, AgentClient(spec.sandbox_id, self.channel(instance))

    async def adopted(self, agent: AgentClient, number: int, address: str, reached: int) -> str:
        """Have a clone's pod adopt the container and start it; return its id."""
        new, volume = f"{number}ec" * 10, f"{number}c1e" * 5
        sandbox = cri.PodSandboxConfig(hostname="clone")
        await agent.configure(sandbox, cri.DNSConfig())
        self.assertEqual((await agent.stats()).containers, [])
        hook = Hook(("sh", "-c", f"({RANDOM}) >/random"))
        adoption = Adoption(OLD, new, self.config(volume, address), hook)
        await agent.adopt([adoption], {SECRET: volume}, sandbox)
        await self.put(agent, volume, b"of clone %d" % number)
        await agent.start(new)
        self.assertEqual(await self.said(agent, new, "cat", "/key"), f"of clone {number}")
        self.assertEqual(await self.said(agent, new, "cat", "/closed"), "closed")
        self.assertGreater(await self.counts(agent, new), reached)
        return new

    def pss(self, instance: Instance) -> int:
        """Return the MiB that a VM's QEMU takes of the node, with its part of what it shares."""
        [pid] = self.pids(instance)
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        found = re.search(r"^Pss: +(\d+) kB", rollup, re.MULTILINE)
        assert found is not None
        return int(found[1]) >> 10


@slow(180, "its VMs are emulated where there is no KVM")
class KeptCloneTests(KeptPodCase, TestCase):
    """One VM is kept, and several others start from it."""

    async def test_each_is_a_pod_of_its_own(self) -> None:
        instance, agent, _ = await self.pod()
        reached = await self.counts(agent, OLD)
        directory = await self.kept(agent, instance)
        clones = [await self.clone(directory)]
        keeper: Any = self.providers[-1]
        await self.refused(FailedPrecondition, keeper.keep(clones[0][0].id, directory, SECONDS))
        said = [await self.goes_on(0, *clones[0], reached)]
        await self.restarted(self.providers[-1])  # another daemon's clones share no memory with the first one
        clones += await gatherResults([start(self.clone(directory)) for _ in range(2)], consumeErrors=True)
        (attacker,), (victim,) = [self.pids(clone) for clone, _ in clones[1:]]
        files = states(directory.iterdir())
        tried = attack(attacker, victim, self.vms() / clones[1][0].token)
        self.assertGreaterEqual(tried.descriptors, 8)
        self.assertEqual((tried.written, tried.reached), ([], []), "they share memory, and reach no other")
        self.assertEqual(states(directory.iterdir()), files)
        shutil.rmtree(directory)
        said += [await self.goes_on(number, *clones[number], reached) for number in (1, 2)]
        print(f"PSS {[self.pss(clone) for clone, _ in clones]} MiB", flush=True)
        said.append(await self.said(agent, OLD, "sh", "-c", RANDOM))
        for one in zip(*(each.split("\n") for each in said), strict=True):
            self.assertEqual(len(set(one)), len(said), one)
        self.assertEqual(len({each.address for each in (instance, *(clone for clone, _ in clones))}), 4)
        await self.counts(agent, OLD)
        ran = await agent.exec_sync(OLD, ["cat", "/closed"], 30, 60.0, 100)
        self.assertNotEqual(ran.exit_code, 0, "the pod that was kept has lost its connection")

    async def goes_on(self, number: int, clone: Instance, agent: AgentClient, reached: int) -> str:
        """Check that a clone's container goes on from where the kept one was; return its random words."""
        new = await self.adopted(agent, number, clone.address, reached)
        return await self.said(agent, new, "cat", "/random")

    async def test_one_with_more_memory_and_processors(self) -> None:
        instance, agent, _ = await self.pod(LARGER)
        reached = await self.counts(agent, OLD)
        directory = await self.kept(agent, instance)
        more = attrs.evolve(LARGER, memory_bytes=2 << 30)
        spec = attrs.evolve(self.spec(size=more), kept=directory)
        await self.refused(FailedPrecondition, self.providers[-1].launch(spec))
        clone, its = await self.clone(directory, LARGER)
        await self.goes_on(0, clone, its, reached)
        provider: Any = self.providers[-1]
        self.assertEqual(await self.within(provider.resize(clone.id, LARGER)), LARGER)
