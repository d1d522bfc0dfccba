# SPDX-License-Identifier: Apache-2.0
"""The picture of the rooms shows each of them above all that it imports."""

from __future__ import annotations

from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from tests.docs import rooms
from tests.docs.rooms import below, drawn, floors_of, graph_of, main, reduced, room_of
from tests.harness.imports import modules


class PictureTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.graph = graph_of(modules())

    def test_it_is_of_this_tree(self) -> None:
        self.assertEqual(main(["--check"]), 0, "draw it again: make rooms")

    def test_one_of_another_tree_or_none_is_refused_and_drawn_again(self) -> None:
        self.patch(rooms, "PICTURE", Path(self.mktemp()))
        self.assertEqual(main(["--check"]), 1)
        rooms.PICTURE.write_text(drawn({"a": frozenset()}))
        self.assertEqual(main(["--check"]), 1)
        self.assertEqual((main([]), main(["--check"])), (0, 0))

    def test_it_has_every_room_and_no_arrow_leads_up(self) -> None:
        floors = floors_of(reduced(self.graph))
        number = {room: index for index, floor in enumerate(floors) for room in floor}
        self.assertEqual(number.keys(), self.graph.keys())
        for room in ("infranetes.cri", "infranetes.pods.features", "infranetes.providers.qemu", "txgrpc"):
            self.assertIn(room, number)
        up = [
            (room, one)
            for room, others in self.graph.items()
            for one in others
            if number[one] >= number[room]
        ]
        self.assertEqual(up, [])

    def test_what_follows_from_other_arrows_is_left_out_and_nothing_else(self) -> None:
        graph = {
            "a": frozenset("bcd"),
            "b": frozenset("c"),
            "c": frozenset("d"),
            "d": frozenset(),
        }
        self.assertEqual(reduced(graph), {**graph, "a": frozenset("b")})
        fewer = reduced(self.graph)
        self.assertEqual(
            {room: below(fewer, room) for room in fewer}, {room: below(self.graph, room) for room in fewer}
        )

    def test_a_module_is_in_the_innermost_room_that_is_drawn(self) -> None:
        for module, room in (
            ("infranetes.pods.node.hooks", "infranetes.pods.node"),
            ("infranetes.pods.reconcile", "infranetes.pods"),
            ("infranetes.providers.qemu.vm.record", "infranetes.providers.qemu"),
            ("infranetes.cri.status", "infranetes.cri"),
            ("infranetes.observer", "infranetes.observer"),
            ("infranetes", ""),
            ("vmserver.rpc.agent", "vmserver.rpc"),
            ("vmserver", ""),
        ):
            self.assertEqual(room_of(module), room)
