# SPDX-License-Identifier: Apache-2.0
"""Huge pages in a real VM: reserved for containers, within their limits, and in an emptyDir of them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

from infranetes_common.wire import cri
from tests.e2e.pod_case import PodCase
from tests.support.empty_dirs import EmptyDirCase

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
