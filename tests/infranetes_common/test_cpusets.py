# SPDX-License-Identifier: Apache-2.0
"""Lists of processors and memory nodes: what is one, and where they stand in a container's resources."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from infranetes_common import cpusets
from infranetes_common.errors import InvalidArgument
from infranetes_common.wire import cri

NUMBERS = st.sets(st.integers(0, cpusets.MOST - 1), max_size=20)


class ListTests(SynchronousTestCase):
    def test_numbers_and_ranges(self) -> None:
        for text, numbers in (
            ("", []),
            ("0", [0]),
            ("0-2,4", [0, 1, 2, 4]),
            ("4, 3-3", [3, 4]),
            ("8191", [8191]),
        ):
            self.assertEqual(sorted(cpusets.parse(text, "cpus")), numbers, text)

    def test_what_is_no_list_is_refused_with_its_field(self) -> None:
        for text in (
            "2-1",
            "8192",
            "0-8192",
            "1,",
            ",",
            "-1",
            "a",
            "٣",
            "1--2",
            "0x1",
            "99999",
            "0;1",
        ):
            error = self.assertRaises(InvalidArgument, cpusets.parse, text, "linux.cpuset_cpus")
            self.assertIn("linux.cpuset_cpus: ", str(error), text)

    @given(NUMBERS, NUMBERS)
    def test_a_union_is_the_shortest_list_of_all_numbers(self, first: set[int], second: set[int]) -> None:
        texts = [",".join(map(str, numbers)) for numbers in (first, second)]
        united = cpusets.union(texts, "cpus")
        self.assertEqual(cpusets.parse(united, "cpus"), first | second)
        starts = {number for number in first | second if number - 1 not in first | second}
        self.assertEqual(len(united.split(",")) if united else 0, len(starts))


class ResourcesTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.unified = cri.LinuxContainerResources(
            unified={
                cpusets.CPUS: "1",
                cpusets.MEMS: "0",
                "cpuset.cpus.partition": "root",
                "memory.high": "9",
            }
        )
        self.fields = cri.LinuxContainerResources(cpuset_cpus="2", cpuset_mems="1", cpu_shares=7)

    def test_the_fields_or_what_names_the_files(self) -> None:
        for resources, lists in ((self.unified, ("1", "0")), (self.fields, ("2", "1"))):
            self.assertEqual((cpusets.cpus_of(resources), cpusets.mems_of(resources)), lists)

    def test_each_list_is_checked(self) -> None:
        cpusets.check(self.unified, "linux")
        for field, wrong in (
            ("cpuset_cpus", cri.LinuxContainerResources(cpuset_cpus="x")),
            ("cpuset_mems", cri.LinuxContainerResources(cpuset_mems="x")),
            ("cpuset_cpus", cri.LinuxContainerResources(unified={cpusets.CPUS: "x"})),
            ("cpuset_mems", cri.LinuxContainerResources(unified={cpusets.MEMS: "x"})),
        ):
            error = self.assertRaises(InvalidArgument, cpusets.check, wrong, "linux")
            self.assertIn(f"linux.{field}: ", str(error))

    def test_a_guest_gets_none_and_the_node_keeps_its_own(self) -> None:
        self.assertEqual(
            cpusets.without(self.unified), cri.LinuxContainerResources(unified={"memory.high": "9"})
        )
        self.assertEqual(cpusets.without(self.fields), cri.LinuxContainerResources(cpu_shares=7))
        self.assertEqual(self.fields.cpuset_cpus, "2")
        self.assertIn(cpusets.CPUS, self.unified.unified)
