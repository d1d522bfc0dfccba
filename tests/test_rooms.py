# SPDX-License-Identifier: Apache-2.0
"""Imports run one way: what docs/architecture.md says of the rooms."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from tests.harness.imports import beside, circle, modules, within

ABOVE_KUBERNETES = ("infranetes.cri", "infranetes.pods", "infranetes.machines", "infranetes.providers")
MONITORING = ("infranetes.monitoring", "prometheus_client")  # these tell `infranetes.observer` alone

# What a package or room never imports.
NEVER = {
    "txgrpc": ("infranetes_common", "infranetes", "vmserver", "infranetes_simulation"),
    "infranetes_common": ("infranetes", "vmserver", "infranetes_simulation"),
    "infranetes": ("vmserver", "infranetes_simulation"),
    "vmserver": ("infranetes", "infranetes_simulation"),
    "infranetes.providers": ("infranetes.cri", "infranetes.pods", "infranetes.machines", *MONITORING),
    "infranetes.publish": ("infranetes.cri", "infranetes.pods", "infranetes.machines", "infranetes.daemon"),
    "infranetes.machines": ("infranetes.cri", "infranetes.pods", *MONITORING),
    "infranetes.observer": ("infranetes.cri", "infranetes.pods", "infranetes.machines", *MONITORING),
    "infranetes.csi": ("infranetes.cri", "infranetes.pods", "infranetes.machines", "infranetes.daemon"),
    "infranetes.overlay": ("infranetes.cri", "infranetes.pods", "infranetes.machines"),
    "infranetes.delegate": (*ABOVE_KUBERNETES, "infranetes.daemon", "infranetes.control"),
    "infranetes.control": ("infranetes.ctl",),
    "infranetes.ctl": ("infranetes.cri", "infranetes.machines", "infranetes.control"),
    "infranetes.pods": ("infranetes.cri", "infranetes.daemon", "infranetes.control", *MONITORING),
    "infranetes.cri": MONITORING,
    "infranetes_simulation.farm": ("infranetes",),
    "infranetes_simulation.containers": ("infranetes",),
    "infranetes_simulation.machine": ("infranetes", "infranetes_common", "vmserver", "txgrpc", "twisted"),
    "vmserver.layers": ("vmserver.rpc", "vmserver.identity", "vmserver.prewarm", "vmserver.containers"),
    "vmserver.firewall": ("vmserver.rpc", "vmserver.identity", "vmserver.containers"),
    "infranetes.kubernetes": (*ABOVE_KUBERNETES, "infranetes.services", "infranetes.policies"),
    "infranetes.services": (*ABOVE_KUBERNETES, "infranetes.policies"),
    "infranetes.policies": (*ABOVE_KUBERNETES, "infranetes.services"),
    "vmserver.containers": ("vmserver.rpc", "vmserver.identity", "vmserver.prewarm"),
}

BOTH_WAYS = {"infranetes.pods.node", "txgrpc"}  # rooms whose modules know each other's types


class RoomTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.modules = modules()

    def test_what_must_not_be_imported_is_not(self) -> None:
        wrong = [
            f"{module} imports {name}"
            for room, never in NEVER.items()
            for module, names in self.modules.items()
            if within(module, room)
            for name in sorted(names)
            if any(within(name, other) for other in never)
        ]
        self.assertEqual(wrong, [])

    def test_modules_import_each_other_in_no_circle(self) -> None:
        graph = {}
        for module, names in self.modules.items():
            known = names & self.modules.keys()
            packages = {
                name for name in known if any(within(other, name) and other != name for other in known)
            }
            graph[module] = known - packages - {module}
        self.assertIn("infranetes.config.schema", graph["infranetes.config.reading"])
        self.assertEqual(circle(graph), [])

    def test_what_lies_side_by_side_in_a_room_imports_each_other_in_no_circle(self) -> None:
        """What is imported for types alone counts too."""
        found = modules(types=True)
        rooms = {module.rpartition(".")[0] for module in found} - {""}
        self.assertLess({"infranetes", "infranetes.providers.cloud", "vmserver"}, rooms)
        for room in sorted(rooms - BOTH_WAYS):
            graph: dict[str, set[str]] = {}
            for module, names in found.items():
                if one := beside(module, room):
                    others = {other for name in names if (other := beside(name, room))} - {one}
                    graph.setdefault(one, set()).update(others)
            self.assertEqual(circle(graph), [], room)

    def test_a_circle_is_found(self) -> None:
        self.assertEqual(circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}), ["b", "c", "b"])
        self.assertEqual(circle({"a": {"b", "c"}, "b": {"c"}}), [])
