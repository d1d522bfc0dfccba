# SPDX-License-Identifier: Apache-2.0
"""A control group's files are parsed."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.machine_usage import MAX_FILE
from tests.support.peak import peak
from vmserver.stats import cgroup, container

# From a container of 64 MiB on Debian 12 (Linux 6.1), shortened.
SAMPLE = {
    "cpu.stat": "usage_usec 2500000\nuser_usec 2000000\nsystem_usec 500000\n"
    "core_sched.force_idle_usec 0\nnr_periods 40\nnr_throttled 7\nthrottled_usec 123456\n",
    "memory.current": "41943040\n",
    "memory.stat": "anon 20971520\nfile 16777216\nkernel 3145728\nkernel_stack 65536\nfile_mapped 4194304\n"
    "inactive_file 8388608\nactive_file 6291456\npgfault 1234\npgmajfault 12\n",
    "memory.max": "67108864\n",
    "memory.swap.current": "0\n",
    "memory.swap.max": "0\n",
    "memory.events": "low 0\nhigh 0\nmax 5\noom 1\noom_kill 2\noom_group_kill 0\n",
    "pids.current": "9\n",
    "pids.max": "max\n",
    "cgroup.procs": "100\n101\n102\n",
    "io.stat": "254:0 rbytes=4096 wbytes=8192 rios=1 wios=2 dbytes=0 dios=0\n7:0 \n",
    "cpu.pressure": "some avg10=1.50 avg60=0.25 avg300=0.00 total=4242\n"
    "full avg10=0.00 avg60=0.00 avg300=0.00 total=0\n",
}


class UsageTests(SynchronousTestCase):
    """The content of files."""

    def test_a_containers_group(self) -> None:
        usage = cgroup.usage(SAMPLE, 77)
        self.assertEqual(usage.time_nanos, 77)
        cpu = usage.cpu
        self.assertEqual(
            (cpu.total_nanos, cpu.user_nanos, cpu.system_nanos), (2_500_000_000, 2_000_000_000, 500_000_000)
        )
        self.assertEqual((cpu.periods, cpu.throttled_periods, cpu.throttled_nanos), (40, 7, 123_456_000))
        self.assertFalse(cpu.HasField("nano_cores"))
        memory = usage.memory
        self.assertEqual((memory.usage, memory.working_set, memory.rss), (40 << 20, 32 << 20, 20 << 20))
        self.assertEqual((memory.cache, memory.mapped_file, memory.kernel), (16 << 20, 4 << 20, 3 << 20))
        self.assertEqual((memory.limit, memory.swap_limit.value), (64 << 20, 0))
        self.assertTrue(memory.HasField("swap_limit"))
        self.assertEqual((memory.page_faults, memory.major_page_faults), (1234, 12))
        self.assertEqual((memory.limit_hits, memory.oom_kills, memory.highest_usage), (5, 2, 0))
        self.assertEqual((usage.processes, usage.threads, usage.threads_limit), (3, 9, 0))
        (disk,) = usage.disks
        self.assertEqual(
            (disk.device, disk.read_bytes, disk.written_bytes, disk.reads, disk.writes),
            ("254:0", 4096, 8192, 1, 2),
        )
        self.assertEqual((usage.cpu_pressure.Some.Total, usage.cpu_pressure.Some.Avg10), (4242, 1.5))
        self.assertTrue(usage.cpu_pressure.HasField("Full"))
        self.assertFalse(usage.HasField("io_pressure"))

    def test_without_a_limit(self) -> None:
        usage = cgroup.usage({**SAMPLE, "memory.max": "max\n", "memory.swap.max": "max\n"}, 1)
        self.assertEqual(usage.memory.limit, 0)
        self.assertFalse(usage.memory.HasField("swap_limit"))

    def test_a_group_whose_memory_is_not_kept(self) -> None:
        usage = cgroup.usage({"cpu.stat": SAMPLE["cpu.stat"]}, 1)
        self.assertFalse(usage.HasField("memory"))
        self.assertTrue(usage.HasField("cpu"))

    def test_an_older_kernel_has_no_sum_of_the_kernels_memory(self) -> None:
        stat = "anon 1\nkernel_stack 10\npagetables 20\npercpu 30\nslab 40\n"
        self.assertEqual(cgroup.usage({**SAMPLE, "memory.stat": stat}, 1).memory.kernel, 100)

    def test_a_working_set_is_never_negative(self) -> None:
        usage = cgroup.usage({**SAMPLE, "memory.current": "100\n"}, 1)
        self.assertEqual(usage.memory.working_set, 0)

    def test_without_files_there_is_no_usage(self) -> None:
        self.assertIsNone(cgroup.usage({}, 1))
        self.assertIsNone(cgroup.usage(cgroup.read(Path("/nonexistent")), 1))

    def test_a_line_of_many_words_takes_little_more_memory_than_it_is(self) -> None:
        size = 1 << 20
        for name in cgroup.FILES:
            files = {**SAMPLE, name: "8:0 a=22 " * (size // 9)}
            self.assertLess(peak(partial(cgroup.usage, files, 1)), 4 * size, name)

    @given(st.dictionaries(st.sampled_from(cgroup.FILES), st.text(max_size=200)))
    def test_any_content_is_parsed_or_ignored(self, files: dict[str, str]) -> None:
        usage = cgroup.usage(files, 1)
        self.assertEqual(usage is None, "cpu.stat" not in files)


class ReadTests(SynchronousTestCase):
    """Files in a directory."""

    def setUp(self) -> None:
        self.root = Path(self.mktemp())
        self.group = (
            self.root / cgroup.of_process(os.getpid()) if cgroup.of_process(os.getpid()) else self.root
        )
        self.group.mkdir(parents=True, exist_ok=True)
        for name, text in SAMPLE.items():
            (self.group / name).write_text(text)

    def test_the_existing_files_are_read(self) -> None:
        self.assertEqual(cgroup.read(self.group), SAMPLE)

    def test_names_that_are_no_files_are_left_out(self) -> None:
        (self.group / "memory.stat").unlink()
        (self.group / "memory.stat").mkdir()
        self.assertNotIn("memory.stat", cgroup.read(self.group))

    def test_a_file_without_end_is_cut(self) -> None:
        (self.group / "cgroup.procs").write_text("1\n" * MAX_FILE)
        self.assertLessEqual(len(cgroup.read(self.group)["cgroup.procs"]), MAX_FILE + 65536)

    def test_a_process_in_a_group_of_another_name_is_not_the_container(self) -> None:
        self.patch(cgroup, "of_process", lambda pid: "system.slice/docker-abc.scope")
        self.assertIsNone(container.usage(os.getpid(), 0, "def", self.root))

    def test_a_process_in_its_group_has_the_groups_figures(self) -> None:
        group = self.root / "system.slice" / "docker-abc.scope"
        group.mkdir(parents=True)
        for name, text in SAMPLE.items():
            (group / name).write_text(text)
        self.patch(cgroup, "of_process", lambda pid: "system.slice/docker-abc.scope")
        self.assertEqual(container.usage(os.getpid(), 0, "abc", self.root).processes, 3)

    def test_without_a_group_the_family_counts(self) -> None:
        self.patch(cgroup, "of_process", lambda pid: "")
        usage = container.usage(os.getpid(), 1 << 40, "abc", self.root)
        self.assertGreaterEqual(usage.processes, 1)
        self.assertGreater(usage.memory.working_set, 1 << 20)
        self.assertGreaterEqual(usage.memory.usage, usage.memory.rss)
        self.assertEqual(usage.memory.limit, 1 << 40)
        self.assertGreater(usage.cpu.total_nanos, 0)

    def test_a_process_that_does_not_exist_has_none(self) -> None:
        pid = os.fork()
        if not pid:
            os._exit(0)
        os.waitpid(pid, 0)
        self.assertIsNone(container.usage(pid, 0, "", self.root))
