# SPDX-License-Identifier: Apache-2.0
"""A Linux's usage is read from the text of proc(5)'s files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from twisted.trial.unittest import SynchronousTestCase

from infranetes_common import machine_usage as machine
from tests.support.peak import peak

SAMPLE = {
    "stat": "cpu  1000 200 300 40000 50 6 7 80 0 0\ncpu0 1000 200 300 40000 50 6 7 80 0 0\nintr 5\n",
    "meminfo": "MemTotal:         524288 kB\nMemFree:          262144 kB\nMemAvailable:     400000 kB\n"
    "Cached:           102400 kB\nActive(file):      20480 kB\nInactive(file):    51200 kB\n"
    "AnonPages:         61440 kB\nMapped:            10240 kB\nSlab:               2048 kB\n"
    "KernelStack:        1024 kB\nPageTables:         1024 kB\nSwapTotal:             0 kB\n"
    "SwapFree:              0 kB\nHugePages_Total:       0\n",
    "vmstat": "pgfault 4321\npgmajfault 21\noom_kill 1\n",
    "net/dev": "Inter-|   Receive                                                |  Transmit\n"
    " face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls"
    " carrier compressed\n"
    "    lo:     100       1    0    0    0     0          0         0      100       1    0    0    0     0"
    "       0          0\n"
    "  ens5:       5       1    0    0    0     0          0         0        6       1    0    0    0     0"
    "       0          0\n"
    "  ens4:123456789    1000    3    4    0     0          0         0 98765432     900    5    6    0     0"
    "       0          0\n"
    "docker0:      7       1    0    0    0     0          0         0        8       1    0    0    0     0"
    "       0          0\n",
    "net/route": "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"
    "ens5\t0000550A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n"
    "ens4\t00000000\t0100550A\t0003\t0\t0\t0\t00000000\t0\t0\t0\n",
    "pressure/cpu": "some avg10=0.50 avg60=0.00 avg300=0.00 total=99\n",
}


class MachineTests(SynchronousTestCase):
    """The content of files."""

    def test_processors_and_memory(self) -> None:
        usage = machine.usage(SAMPLE, 5)
        self.assertEqual(usage.cpu.user_nanos, 12 * 10**9)
        self.assertEqual(usage.cpu.system_nanos, 3_130_000_000)
        self.assertEqual(usage.cpu.total_nanos, 15_130_000_000)
        memory = usage.memory
        self.assertEqual((memory.limit, memory.usage, memory.working_set), (512 << 20, 256 << 20, 206 << 20))
        self.assertEqual((memory.rss, memory.cache, memory.kernel), (60 << 20, 100 << 20, 4 << 20))
        self.assertEqual((memory.page_faults, memory.major_page_faults, memory.oom_kills), (4321, 21, 1))
        self.assertFalse(memory.HasField("swap_limit"))
        self.assertEqual(usage.cpu_pressure.Some.Total, 99)

    def test_files_of_any_length_take_no_more_memory_than_they_are(self) -> None:
        """Containers may have the kernel list many cards and routes."""
        size = 4 << 20

        def usage(files: Mapping[str, str]) -> object:
            return machine.usage(files, 5)

        cards = "card: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16\n"
        files: list[tuple[Callable[[Mapping[str, str]], object], str]]
        files = [(machine.cards, "net/dev"), (machine.cards, "net/route")]
        files += [(usage, name) for name in ("stat", "meminfo", "vmstat", "pressure/io")]
        # Many lines, and a line of many words.
        for begin, words in (("", "\n"), ("", "a b\n"), ("", cards), ("\n\ncard: ", "22 "), ("", "a=22 ")):
            text = begin + words * (size // len(words))
            for parse, name in files:
                self.assertLess(peak(partial(parse, {name: text})), 4 * size, (name, words))
        self.assertEqual(len(machine.cards({"net/dev": cards * 100})), machine.MAX_CARDS)

    def test_the_pods_card_comes_first_and_inner_interfaces_are_left_out(self) -> None:
        first, second = machine.cards(SAMPLE)
        self.assertEqual((first.name, second.name), ("ens4", "ens5"))
        self.assertEqual(
            (first.received_bytes, first.received_packets, first.receive_errors, first.receive_drops),
            (123456789, 1000, 3, 4),
        )
        self.assertEqual(
            (first.sent_bytes, first.sent_packets, first.send_errors, first.send_drops), (98765432, 900, 5, 6)
        )

    def test_without_files_there_are_no_figures_and_no_failure(self) -> None:
        usage = machine.usage({}, 5)
        self.assertEqual((usage.cpu.total_nanos, usage.memory.limit), (0, 0))
        self.assertEqual(machine.cards({}), [])

    def test_what_is_no_figure_is_left_out_and_what_is_too_large_is_bounded(self) -> None:
        """The files may be a guest's, which writes what it likes."""
        huge = "9" * 5000
        usage = machine.usage(
            {
                "stat": f"cpu {huge} {huge} {huge} -1 x 6 {huge} 80\n",
                "meminfo": "".join(f"{name}: {huge} kB\n" for name in (
                    "MemTotal", "MemFree", "Slab", "KernelStack", "PageTables", "SwapTotal", "Cached")),
                "vmstat": f"pgfault {huge}\npgmajfault -1\n",
                "pressure/cpu": f"some avg10=nan avg60=0.00 avg300=0.00 total={huge}\n",
                "pressure/io": f"some avg10=1e999 avg60=0.00 avg300=0.00 total={huge}\n",
            },
            5,
        )  # fmt: skip
        self.assertEqual((usage.memory.page_faults, usage.memory.major_page_faults), (machine.MAX_NUMBER, 0))
        self.assertFalse(usage.HasField("cpu_pressure") or usage.HasField("io_pressure"))
        (card,) = machine.cards({"net/dev": f"\n\n{huge}: {huge} x -1 4 5 6 7 8 9 10 11 12\n"})
        self.assertEqual((len(card.name), card.received_bytes, card.received_packets), (64, 2**53, 0))
