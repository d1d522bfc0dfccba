# SPDX-License-Identifier: Apache-2.0
"""What a container may do, as its specification has it."""

from __future__ import annotations

from typing import Any

from infranetes_common.wire import cri
from tests.vmserver.containers.oci.spec_case import Refusing, secured, spec
from vmserver.containers.accounts import ProcessUser
from vmserver.containers.oci.capabilities import DEFAULT, NAMES
from vmserver.containers.oci.devices import Node
from vmserver.containers.oci.kernel import Kernel
from vmserver.containers.oci.lookup import Lookup


class SecurityTests(Refusing):
    def sets(self, uid: int = 0, privileged: bool = False, **fields: Any) -> Any:
        found = secured(
            {"lookup": Lookup(user=ProcessUser(uid=uid))},
            privileged=privileged,
            capabilities=cri.Capability(**fields),
        )
        return found["process"]["capabilities"]

    def bounding(self, **fields: Any) -> set[str]:
        return set(self.sets(**fields)["bounding"])

    def test_capabilities_are_the_defaults_with_what_is_added_and_dropped(self) -> None:
        self.assertEqual(self.bounding(), DEFAULT)
        self.assertEqual(self.bounding(add_capabilities=["net_admin"]), DEFAULT | {"CAP_NET_ADMIN"})
        self.assertEqual(self.bounding(drop_capabilities=["CAP_KILL"]), DEFAULT - {"CAP_KILL"})
        self.assertEqual(self.bounding(add_capabilities=["ALL"]), set(NAMES))
        without_kill = self.bounding(add_capabilities=["ALL"], drop_capabilities=["KILL"])
        self.assertEqual(without_kill, set(NAMES) - {"CAP_KILL"})
        self.assertEqual(self.bounding(add_capabilities=["KILL"], drop_capabilities=["ALL"]), {"CAP_KILL"})
        self.assertEqual(self.bounding(add_capabilities=["KILL"], drop_capabilities=["kill", "ALL"]), set())
        self.assertEqual(self.bounding(privileged=True), set(NAMES))

    def test_only_root_has_effective_capabilities(self) -> None:
        self.assertEqual(set(self.sets()["effective"]), DEFAULT)
        self.assertEqual(self.sets(uid=1000)["effective"], [])
        self.assertEqual(set(self.sets(uid=1000)["bounding"]), DEFAULT)

    def test_ambient_capabilities_stay_with_any_user(self) -> None:
        found = self.sets(uid=1000, add_ambient_capabilities=["SYS_TIME"])
        for kind in ("effective", "permitted", "inheritable", "ambient"):
            self.assertEqual(found[kind], ["CAP_SYS_TIME"])
        self.assertIn("CAP_SYS_TIME", found["bounding"])
        both = {"add_ambient_capabilities": ["KILL"], "drop_capabilities": ["KILL"]}
        self.refused("add_ambient_capabilities", self.sets, **both)
        found = self.sets(uid=1000, privileged=True, **both)
        self.assertEqual((found["ambient"], set(found["bounding"])), (["CAP_KILL"], set(NAMES)))
        every = self.sets(uid=1000, add_ambient_capabilities=["ALL"])
        self.assertEqual((every["ambient"], every["bounding"]), (list(NAMES), list(NAMES)))

    def test_what_is_no_capability_is_refused(self) -> None:
        for field in ("add_capabilities", "drop_capabilities", "add_ambient_capabilities"):
            for name in ("NO_SUCH", "", "a b", "SYS_ADMIN\0"):
                self.refused("security_context.capabilities", self.sets, **{field: [name]})

    def test_what_the_machine_can_not_give_is_refused_if_it_is_asked_for(self) -> None:
        kernel = {"kernel": Kernel(capabilities=frozenset(NAMES) - {"CAP_BPF"})}
        add = cri.Capability(add_capabilities=["BPF"])
        self.refused("CAP_BPF", secured, others=kernel, capabilities=add)
        every = secured(kernel, privileged=True)["process"]["capabilities"]["bounding"]
        self.assertEqual(set(every), set(NAMES) - {"CAP_BPF"})

    def test_privileged(self) -> None:
        device = Node("/dev/x", False, 10, 1, 0o600, 0, 0)
        found = secured({"lookup": Lookup(devices=(device,))}, privileged=True, masked_paths=["/proc/kcore"])
        self.assertEqual(found["linux"]["resources"]["devices"], [{"allow": True, "access": "rwm"}])
        self.assertEqual(found["linux"]["devices"][0]["path"], "/dev/x")
        for absent in ("maskedPaths", "readonlyPaths", "seccomp"):
            self.assertNotIn(absent, found["linux"])
        for mount in found["mounts"]:
            self.assertNotIn("ro", mount["options"])

    def test_masked_and_read_only_paths_are_those_that_are_listed(self) -> None:
        linux = secured(masked_paths=["/a"], readonly_paths=["/b"])["linux"]
        self.assertEqual((linux["maskedPaths"], linux["readonlyPaths"]), (["/a"], ["/b"]))
        linux = secured(no_new_privs=True)["linux"]
        self.assertEqual((linux["maskedPaths"], linux["readonlyPaths"]), ([], []))
        linux = spec()["linux"]
        self.assertIn("/proc/kcore", linux["maskedPaths"])
        self.assertIn("/proc/sys", linux["readonlyPaths"])
        self.refused("security_context.masked_paths", secured, masked_paths=["proc"])

    def test_a_device_of_the_vm(self) -> None:
        device = Node("/dev/x", True, 8, 1, 0o660, 0, 6, "rw")
        linux = spec(others={"lookup": Lookup(devices=(device,))})["linux"]
        self.assertEqual(
            linux["devices"],
            [{"path": "/dev/x", "type": "b", "major": 8, "minor": 1, "fileMode": 0o660, "uid": 0, "gid": 6}],
        )
        self.assertEqual(
            linux["resources"]["devices"],
            [
                {"allow": False, "access": "rwm"},
                {"allow": True, "type": "b", "major": 8, "minor": 1, "access": "rw"},
            ],
        )

    def test_apparmor(self) -> None:
        there = {"kernel": Kernel(apparmor=True)}
        kinds: Any = cri.SecurityProfile

        def profile(others: Any, **fields: Any) -> Any:
            return secured(others, **fields)["process"].get("apparmorProfile")

        self.assertEqual(profile(there), "infranetes-default")
        self.assertIsNone(profile({}))
        self.assertIsNone(profile(there, privileged=True))
        self.assertIsNone(profile(there, apparmor=kinds(profile_type=kinds.Unconfined)))
        local = kinds(profile_type=kinds.Localhost, localhost_ref="mine\nprofile mine {}")
        self.assertEqual(profile(there, apparmor=local), "mine")
        self.assertEqual(profile(there, apparmor=local, privileged=True), "mine")
        self.refused("security_context.apparmor", secured, apparmor=kinds(profile_type=7))

    def test_a_read_only_root(self) -> None:
        self.assertEqual(secured()["root"], {"path": "/run/c1/rootfs", "readonly": False})
        self.assertTrue(secured(readonly_rootfs=True)["root"]["readonly"])

    def test_annotations_are_not_for_crun(self) -> None:
        self.assertNotIn("annotations", spec(annotations={"run.oci.handler": "krun"}))
