# SPDX-License-Identifier: Apache-2.0
"""What VMs have of memory and processors: idle ones, huge pages, and sizes that change while a pod runs."""

from __future__ import annotations

import os
import secrets
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase
from zope.interface import implementer

from infranetes.providers.cgroup_parents import group_path
from infranetes.providers.interface import IGuest, Instance, IResizesVms, MemoryRange, Size
from infranetes.providers.qemu.cgroups.cgroupfs import Hierarchy, hierarchies, memory_directory
from infranetes_common.errors import InfranetesError, InvalidArgument
from infranetes_common.wire import cri, vmserver
from infranetes_common.wire.vmserver_rpcs import AgentStub
from tests.contract.pod_provider_case import reactor
from tests.e2e.pod_case import PodCase
from tests.e2e.qemu_case import QemuCase
from tests.harness.durations import slow
from tests.support import process_memory
from tests.support.empty_dirs import EmptyDirCase
from tests.support.process_memory import Kind
from txgrpc import Code

GIB = 1 << 30
MIB = 1 << 20
SETTLE_SECONDS = 60.0


@implementer(IGuest)
class Guest:
    """A guest, as reached through its agent."""

    def __init__(self, stub: AgentStub) -> None:
        self.stub = stub
        self.released: list[MemoryRange] = []

    async def release(self, ranges: Sequence[MemoryRange], seconds: float) -> None:
        request = vmserver.ReleaseMemoryRequest(ranges=self.said(ranges), seconds=seconds)
        await self.stub.ReleaseMemory(request, timeout=seconds + 10)
        self.released += ranges

    async def restore(self, ranges: Sequence[MemoryRange]) -> None:
        await self.stub.RestoreMemory(vmserver.RestoreMemoryRequest(ranges=self.said(ranges)), timeout=60)

    async def use_processors(self, count: int) -> None:
        await self.stub.UseProcessors(vmserver.UseProcessorsRequest(count=count), timeout=60)

    def said(self, ranges: Sequence[MemoryRange]) -> list[vmserver.MemoryRange]:
        return [vmserver.MemoryRange(address=each.address, size=each.size) for each in ranges]


@slow(40, "an emulated VM takes and gives memory back five times")
class ResizeTests(QemuCase, TestCase):
    """A VM made with the template's size. The template is shared, so this test has no settings of its own."""

    async def guest(self, stub: AgentStub, cpus: int, memory: int) -> vmserver.InfoResponse:
        """Wait until the guest has so many processors and at least so much memory, and return what it has.

        :param stub: a stub of its agent's service."""
        until = reactor.seconds() + SETTLE_SECONDS
        while True:
            info: vmserver.InfoResponse = await stub.Info(vmserver.InfoRequest(), timeout=SETTLE_SECONDS)
            if (info.cpus == cpus and info.memory_bytes > memory) or reactor.seconds() > until:
                self.assertEqual(info.cpus, cpus)
                self.assertGreater(info.memory_bytes, memory)
                return info
            await deferLater(reactor, 0.2)

    async def test_a_vm_grows_and_shrinks(self) -> None:
        provider: Any = await self.started()  # Any: it has two interfaces
        self.assertTrue(IResizesVms.providedBy(provider))
        launched = await self.within(provider.launch(self.spec()))
        wait = self.boot_timeout
        instance = await self.within(provider.wait_running(launched.id, wait), wait + 5)
        await self.agent_info(instance)
        stub = self.agent(instance)
        first = await self.guest(stub, 1, GIB // 2)

        most = min(os.cpu_count() or 1, 3)
        for _ in range(2):
            wanted = Size(1000, GIB + GIB // 2)
            began = reactor.seconds()
            self.assertEqual(await self.within(provider.resize(instance.id, wanted), wait), wanted)
            print(f"1.5 GiB: {reactor.seconds() - began:.2f} s", flush=True)
        await self.guest(stub, 1, wanted.memory_bytes)

        began = reactor.seconds()
        wanted = Size(most * 1000, 2 * GIB)
        self.assertEqual(await self.within(provider.resize(instance.id, wanted), wait), wanted)
        print(f"{most} processors, 2 GiB: {reactor.seconds() - began:.2f} s", flush=True)
        grown = await self.guest(stub, most, wanted.memory_bytes)

        # The next daemon goes on from what the VM has. It takes no memory if it can't ask the guest.
        await self.within(provider.stop())
        provider = await self.started()
        less = Size(1000, GIB)
        has = await self.within(provider.resize(instance.id, less), 4 * wait)
        left = most if "tcg" in provider.status()["accelerator"] else 1
        self.assertEqual(has.cpu_millis, left * 1000)
        self.assertGreaterEqual(has.memory_bytes, 2 * GIB)
        kept = await self.guest(stub, left, 2 * GIB)
        self.assertEqual(kept.memory_bytes, grown.memory_bytes)

        guest = Guest(stub)
        for _ in range(2):
            began = reactor.seconds()
            has = await self.within(provider.resize(instance.id, less, guest), 4 * wait)
            print(f"1 GiB: {reactor.seconds() - began:.2f} s {has}", flush=True)
            self.assertEqual(has, less)
        info = await self.guest(stub, 1, GIB)
        self.assertLess(info.memory_bytes, GIB + GIB // 4, "the guest has given it back")
        self.assertEqual(info.boot_id, first.boot_id)

        again = Size(most * 1000, 2 * GIB)
        has = await self.within(provider.resize(instance.id, again, guest), 4 * wait)
        self.assertEqual(has, again)
        await self.guest(stub, most, 2 * GIB)
        [last] = guest.released[-1:]
        await guest.release([last], 2.0)
        await self.guest(stub, most, 2 * GIB)  # it was not unplugged, so the guest uses it again
        error = await self.refused(InvalidArgument, provider.resize(instance.id, Size(0, 1 << 50)))
        self.assertIn("max_memory", str(error))
        self.assertEqual(await self.within(provider.resize(instance.id, Size()), wait), Size())
        await self.within(provider.destroy(instance.id))


def limit(mib: int) -> cri.LinuxContainerResources:
    return cri.LinuxContainerResources(memory_limit_in_bytes=mib * MIB)


class GiveBackTests(PodCase):
    """A pod of 1280 MiB whose container uses much memory, and then frees it."""

    async def resize(self, sandbox: str, mib: int) -> None:
        request = cri.UpdatePodSandboxResourcesRequest(pod_sandbox_id=sandbox, resources=limit(mib))
        began = reactor.seconds()
        await self.runtime.UpdatePodSandboxResources(request, timeout=120.0)
        print(f"{mib} MiB: {reactor.seconds() - began:.2f} s", flush=True)

    async def pss(self) -> float:
        """Return the MiB of the node's memory that the VM takes, counting its part of shared pages."""
        [memory] = await deferToThread(process_memory.of_vms, self.root / "state")
        return process_memory.total(memory).proportional

    async def guest(self, container: str) -> int:
        """Return the MiB that the guest has."""
        answer = await self.execute(container, "grep", "MemTotal", "/proc/meminfo")
        return int(answer.stdout.split()[1]) >> 10

    async def test_the_node_has_memory_again_that_a_pod_gives_back(self) -> None:
        await self.start()
        sandbox = await self.run_pod(linux=cri.LinuxPodSandboxConfig(resources=limit(1280)))
        # dd keeps all of it in memory as long as nothing reads more than the pipe holds.
        script = "dd if=/dev/zero bs=1088M count=1 | (head -c 1; echo full; exec sleep 1000)"
        main = await self.run_container(sandbox, self.box(script=script))
        await self.until(lambda: "full" in "".join(self.lines("main")), "it is in memory", 120.0)
        large, used = await self.guest(main), await self.pss()
        self.assertGreater(used, 1088)
        told = await self.refused(Code.FAILED_PRECONDITION, self.resize(sandbox, 768))
        self.assertIn("keeps 1280 MiB for the pod, not 768: what is running leaves", told)
        self.assertEqual(await self.guest(main), large)

        await self.execute(main, "sh", "-c", "killall dd; while pidof dd; do sleep 0.1; done")
        self.assertGreater(await self.pss(), used - 128, "what the guest has no use for QEMU keeps")
        await self.resize(sandbox, 768)
        gone = large - await self.guest(main)
        self.assertLess(abs(gone - 512), 32, f"{gone} MiB are gone, not 512")
        # This takes a moment after QEMU has reported it. Memory that the guest never used can't be given
        # back.
        until = reactor.seconds() + SETTLE_SECONDS
        while (left := await self.pss()) > used - 128 and reactor.seconds() < until:
            await deferLater(reactor, 0.2)
        print(f"{told}; {used:.0f} MiB in use, then {left:.0f}", flush=True)
        self.assertLess(left, used - 128, "what the guest has had in use of 512 MiB is the node's again")


class PodGroupTests(QemuCase, TestCase):
    """A VM in its pod's control group, which this test makes as kubelet does."""

    def setUp(self) -> Any:
        made = super().setUp()
        self.parent = f"infranetes-tests-e2e-{secrets.token_hex(4)}"
        for hierarchy in self.counting():
            (hierarchy.mount / self.parent).mkdir()
            self.addCleanup((hierarchy.mount / self.parent).rmdir)
        return made

    def counting(self) -> list[Hierarchy]:
        return [each for each in hierarchies() if each.has("memory")]

    async def test_it_counts_there_from_the_beginning_and_is_ended_by_the_pods_limit(self) -> None:
        provider = await self.started()
        ended: list[Instance] = []
        provider.watch(ended.append)
        instance = await self.running(provider, self.spec(cgroup_parent=f"/{self.parent}"))
        [pid] = self.pids(instance)
        directory = memory_directory(group_path(self.parent), f"infranetes-{instance.token}")
        assert directory is not None
        self.assertIn(pid, [int(each) for each in (directory / "cgroup.procs").read_text().split()])
        used = "memory.current" if (directory / "memory.current").exists() else "memory.usage_in_bytes"
        counted = int((directory.parent / used).read_text())
        print(f"counted in the pod: {counted / 2**20:.0f} MiB", flush=True)
        self.assertGreater(counted, 16 << 20, "what the VM has written to is counted there")

        # A guest keeps the description of its memory in that memory itself.
        limit = "memory.max" if (directory / "memory.max").exists() else "memory.limit_in_bytes"
        (directory.parent / limit).write_text(str(counted + (4 << 20)))
        assert IResizesVms.providedBy(provider)
        await self.refused(InfranetesError, provider.resize(instance.id, Size(0, 2 * GIB)))
        until = reactor.seconds() + self.notice_timeout
        while not ended and reactor.seconds() < until:
            await deferLater(reactor, 0.05)
        [told] = ended
        self.assertIn("want of memory", told.detail)
        await self.within(provider.destroy(instance.id))
        self.assertFalse(directory.exists())


PODS = 2
MOST = 150.0  # MiB that an idle pod may have written; about 85 are usual
MOST_OF = {Kind.GUEST: 60.0, Kind.CODE: 68.0}


class MemoryTests(PodCase):
    """Pods without a container, in real VMs."""

    async def test_an_idle_pod_has_little_that_is_its_own(self) -> None:
        await self.start()
        for number in range(PODS):
            await self.run_pod(f"pod-{number}")
        found = process_memory.of_vms(self.root / "state")
        self.assertEqual(len(found), PODS)
        for memory in found:
            written = {kind.value: round(each.written, 1) for kind, each in memory.items()}
            self.assertLess(process_memory.total(memory).written, MOST, written)
            for kind, most in MOST_OF.items():
                self.assertLess(memory[kind].written, most, written)
            shared = memory[Kind.GUEST]
            self.assertGreater(shared.shared, 20.0)  # the template's pages, as the guest is not a copy


PAGE = 2 << 20
MANY = 600  # 1200 MiB: more than the VM of a pod that asks for nothing has
NUMBER = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages"
# Writes to each of a number of huge pages, of a file or of anonymous memory.
USE = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

int main(int argc, char **argv) {
    size_t pages = atoi(argv[1]), size = pages << 21;
    int file = argc > 2 ? open(argv[2], O_CREAT | O_RDWR, 0600) : -1;
    int flags = argc > 2 ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB;
    char *at = mmap(0, size, PROT_READ | PROT_WRITE, flags, file, 0);
    if (at == MAP_FAILED) { perror("mmap"); return 1; }
    for (size_t i = 0; i < pages; i++) at[i << 21] = 1;
    printf("used %zu\n", pages);
    return 0;
}
"""


class HugePageTests(EmptyDirCase, PodCase):
    """A pod with an emptyDir of huge pages, in a VM of QEMU."""

    def setUp(self) -> None:
        super().setUp()
        # As kubelet mounts it. The node must support such pages, but none of its own is used.
        options = ["-t", "hugetlbfs", "-o", "pagesize=2Mi", "nodev"]
        subprocess.run(["mount", *options, self.cache], check=True)
        self.addCleanup(subprocess.check_call, ["umount", "-l", str(self.cache)])
        self.cache.chmod(0o2777)
        self.programs = Path(self.root) / "programs"
        self.programs.mkdir()
        source = self.programs / "use.c"
        source.write_text(USE)
        subprocess.run(["gcc", "-static", "-o", self.programs / "use", source], check=True)

    def with_pages(self, name: str, pages: int) -> Any:
        wanted = self.box(name, "sleep 1000", mounts=[self.mount()])
        wanted.mounts.add(container_path="/programs", host_path=str(self.programs), readonly=True)
        for size, limit in (("1GB", 0), ("2MB", pages * PAGE)):  # kubelet sends all sizes of the node
            wanted.linux.resources.hugepage_limits.add(page_size=size, limit=limit)
        return wanted

    async def reserved(self, container: str) -> int:
        return int(await self.ran(container, f"cat {NUMBER}"))

    async def remove(self, container: str) -> None:
        await self.runtime.RemoveContainer(cri.RemoveContainerRequest(container_id=container), timeout=60.0)

    async def test_they_are_the_vms_which_grows_for_as_many_as_containers_may_use(self) -> None:
        await self.start()
        sandbox = await self.run_own_pod()
        first = await self.run_container(sandbox, self.with_pages("first", MANY))
        self.assertEqual(await self.reserved(first), MANY)
        shown = await self.ran(first, "stat -f -c '%t %S' /cache; stat -c %a /cache")
        self.assertEqual(shown, "958458f6 2097152\n2777")  # hugetlbfs
        second = await self.run_container(sandbox, self.with_pages("second", 2))
        self.assertEqual(await self.reserved(first), MANY + 2)
        over = await self.execute(second, "/programs/use", "3")
        self.assertEqual(over.exit_code, 128 + 7, over.stderr)  # SIGBUS: the limit of its control group
        self.assertEqual(await self.ran(second, "/programs/use 2"), "used 2")
        self.assertEqual(await self.ran(first, "/programs/use 4 /cache/pages"), "used 4")
        self.assertEqual(await self.ran(second, "stat -c %s /cache/pages"), str(4 * PAGE))
        await self.refused("max_memory", self.create(sandbox, self.with_pages("greedy", 100_000)))
        self.assertEqual(await self.reserved(first), MANY + 2)
        await self.kill()
        await self.start()
        third = await self.run_container(sandbox, self.with_pages("third", 1))
        self.assertEqual(await self.reserved(third), MANY + 3)
        for container, left in ((second, MANY + 1), (third, MANY)):
            await self.remove(container)
            self.assertEqual(await self.reserved(first), left)
        self.assertEqual(sorted(os.listdir(self.cache)), [])
