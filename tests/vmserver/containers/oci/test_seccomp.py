# SPDX-License-Identifier: Apache-2.0
"""Seccomp profiles are converted for the machine and its capabilities, or refused."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.errors import InvalidArgument
from infranetes_common.wire import cri
from tests.harness.needs import repetitions
from vmserver.containers.oci.capabilities import DEFAULT
from vmserver.containers.oci.kernel import Kernel
from vmserver.containers.oci.seccomp import DEFAULT_FILE, container_seccomp, converted
from vmserver.containers.security import MAX_PROFILE_BYTES

KERNEL = Kernel()
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
_FIELDS = (
    "defaultAction", "defaultErrnoRet", "architectures", "archMap", "flags", "syscalls", "listenerPath",
)  # fmt: skip


def convert(capabilities: Any = DEFAULT, kernel: Kernel = KERNEL, **fields: Any) -> Any:
    text = json.dumps({"defaultAction": "SCMP_ACT_ERRNO", **fields})
    return converted(text, capabilities, kernel)


def names(found: Any, action: str = "SCMP_ACT_ALLOW") -> set[str]:
    """Return the system calls that some rule allows, with any arguments."""
    return {name for rule in found["syscalls"] if rule["action"] == action for name in rule["names"]}


class DefaultTests(SynchronousTestCase):
    def default(self, capabilities: Any = DEFAULT, **of_kernel: Any) -> Any:
        return converted(DEFAULT_FILE.read_text(), capabilities, Kernel(**of_kernel))

    def test_it_says_where_it_is_from(self) -> None:
        comment = json.loads(DEFAULT_FILE.read_text())["comment"]
        for part in ("github.com/moby/profiles", "v0.", "Apache-2.0"):
            self.assertIn(part, comment)

    def test_rules_depend_on_capabilities(self) -> None:
        self.assertNotIn("mount", names(self.default()))
        admin = self.default(DEFAULT | {"CAP_SYS_ADMIN"})
        self.assertIn("mount", names(admin))
        self.assertEqual(names(self.default(), "SCMP_ACT_ERRNO"), {"clone3"})
        self.assertEqual(names(admin, "SCMP_ACT_ERRNO"), set())

    def test_rules_depend_on_the_architecture(self) -> None:
        self.assertIn("arch_prctl", names(self.default()))
        arm = self.default(architecture="aarch64")
        self.assertNotIn("arch_prctl", names(arm))
        self.assertIn("arm_fadvise64_64", names(arm))
        self.assertEqual(arm["architectures"], ["SCMP_ARCH_AARCH64", "SCMP_ARCH_ARM"])
        self.assertEqual(self.default()["architectures"][0], "SCMP_ARCH_X86_64")

    def test_rules_depend_on_the_kernel(self) -> None:
        self.assertIn("ptrace", names(self.default()))
        self.assertNotIn("ptrace", names(self.default(release=(4, 7))))
        self.assertIn("ptrace", names(self.default(release=(4, 8))))

    def test_a_container_has_it_if_it_asks_for_it_and_is_not_privileged(self) -> None:
        def seccomp(**fields: Any) -> Any:
            return container_seccomp(cri.LinuxContainerSecurityContext(**fields), DEFAULT, KERNEL)

        asked = cri.SecurityProfile()
        self.assertIsNone(seccomp())
        self.assertEqual(seccomp(seccomp=asked), self.default())
        self.assertEqual(seccomp(seccomp_profile_path="runtime/default"), self.default())
        self.assertIsNone(seccomp(seccomp=asked, privileged=True))
        of_node = cri.SecurityProfile(profile_type=cri.SecurityProfile.Localhost, localhost_ref="{")
        self.assertRaises(InvalidArgument, seccomp, seccomp=of_node)
        self.assertIsNone(seccomp(seccomp=of_node, privileged=True))
        self.assertIsNone(seccomp(seccomp_profile_path="unconfined"))


class ProfileTests(SynchronousTestCase):
    def test_a_profile_is_taken_over(self) -> None:
        rule = {
            "names": ["mkdir"],
            "action": "SCMP_ACT_ERRNO",
            "errnoRet": 30,
            "args": [{"index": 1, "value": 2**64 - 1, "valueTwo": 0, "op": "SCMP_CMP_EQ"}],
        }
        found = convert(
            defaultErrnoRet=38,
            architectures=["SCMP_ARCH_X86_64"],
            flags=["SECCOMP_FILTER_FLAG_LOG"],
            syscalls=[rule, {"name": "old", "action": "SCMP_ACT_ALLOW", "errnoRet": 5}],
        )
        self.assertEqual(
            found,
            {
                "defaultAction": "SCMP_ACT_ERRNO",
                "defaultErrnoRet": 38,
                "architectures": ["SCMP_ARCH_X86_64"],
                "flags": ["SECCOMP_FILTER_FLAG_LOG"],
                "syscalls": [rule, {"names": ["old"], "action": "SCMP_ACT_ALLOW"}],
            },
        )

    def test_the_least_and_the_most_of_each_number(self) -> None:
        def rule(errno: object = 0, **of_argument: object) -> object:
            its = {"index": 0, "value": 0, "valueTwo": 0, "op": "SCMP_CMP_LT", **of_argument}
            return {"names": ["x"], "action": "SCMP_ACT_TRACE", "errnoRet": errno, "args": [its]}

        for good, bad in (
            (rule(4095), rule(4096)),
            (rule(0), rule(-1)),
            (rule(1), rule(True)),
            (rule(index=5), rule(index=6)),
            (rule(value=2**64 - 1), rule(value=2**64)),
            (rule(valueTwo=2**64 - 1), rule(valueTwo=2**64)),
        ):
            self.assertEqual(convert(syscalls=[good])["syscalls"], [good])
            self.assertRaises(InvalidArgument, convert, syscalls=[bad])
        self.assertEqual(convert(defaultErrnoRet=4095)["defaultErrnoRet"], 4095)
        self.assertRaises(InvalidArgument, convert, defaultErrnoRet=4096)
        self.assertNotIn("defaultErrnoRet", convert(defaultAction="SCMP_ACT_LOG", defaultErrnoRet=5))
        whole = json.dumps({"defaultAction": "SCMP_ACT_LOG"})
        longest = whole + " " * (MAX_PROFILE_BYTES - len(whole))
        self.assertEqual(converted(longest, DEFAULT, KERNEL)["defaultAction"], "SCMP_ACT_LOG")
        self.assertRaises(InvalidArgument, converted, longest + " ", DEFAULT, KERNEL)

    def test_architectures_are_the_profiles_and_those_of_this_machine_each_once(self) -> None:
        here = {"architecture": "SCMP_ARCH_X86_64", "subArchitectures": ["SCMP_ARCH_X86", "SCMP_ARCH_X32"]}
        found = convert(
            architectures=["SCMP_ARCH_X86"],
            archMap=[{"architecture": "SCMP_ARCH_ARM", "subArchitectures": ["SCMP_ARCH_ARMEB"]}, here],
        )
        self.assertEqual(found["architectures"], ["SCMP_ARCH_X86", "SCMP_ARCH_X86_64", "SCMP_ARCH_X32"])
        unknown = Kernel(architecture="vax")
        self.assertNotIn("architectures", convert(kernel=unknown, archMap=[{"architecture": ""}, here]))
        rule = {"names": ["x"], "action": "SCMP_ACT_ALLOW", "includes": {"arches": ["vax"]}}
        self.assertEqual(names(convert(kernel=unknown, syscalls=[rule])), {"x"})

    def test_conditions(self) -> None:
        def applies(**conditions: Any) -> bool:
            rule = {"names": ["x"], "action": "SCMP_ACT_ALLOW", **conditions}
            return bool(convert(["CAP_KILL"], syscalls=[rule])["syscalls"])

        self.assertTrue(applies(includes={}, excludes=None))
        for field, value, there in (
            ("arches", ["amd64"], True),
            ("arches", ["arm64"], False),
            ("caps", ["CAP_KILL"], True),
            ("caps", ["CAP_BPF"], False),
            ("minKernel", "6.1", True),
            ("minKernel", "6.2", False),
            ("minKernel", "5.9", True),
        ):
            self.assertEqual(applies(includes={field: value}), there, value)
            self.assertEqual(applies(excludes={field: value}), not there, value)
        self.assertFalse(applies(includes={"caps": ["CAP_KILL", "CAP_BPF"]}))
        self.assertTrue(applies(includes={"minKernel": ""}, excludes={"minKernel": None}))

    def test_what_is_no_profile_is_refused(self) -> None:
        allow = "SCMP_ACT_ALLOW"
        for fields, word in (
            ({"defaultAction": "SCMP_ACT_NOTIFY"}, "SCMP_ACT_NOTIFY"),
            ({"defaultAction": None}, "action"),
            ({"listenerPath": "/x"}, "listenerPath"),
            ({"flags": ["SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV"]}, "flags"),
            ({"flags": [[]]}, "flags"),
            ({"defaultErrnoRet": -1}, "defaultErrnoRet"),
            ({"architectures": ["x86"]}, "architecture"),
            ({"syscalls": {}}, "syscalls"),
            ({"syscalls": ["mkdir"]}, "object"),
            ({"syscalls": [{"names": ["a b"], "action": allow}]}, "system call"),
            ({"syscalls": [{"names": ["a"], "action": "ALLOW"}]}, "action"),
            ({"syscalls": [{"names": ["a"], "action": allow, "args": [{"op": "EQ"}]}]}, "op"),
            ({"syscalls": [{"names": ["a"], "action": allow, "includes": {"minKernel": "x"}}]}, "minKernel"),
        ):
            with self.assertRaises(InvalidArgument, msg=str(fields)) as caught:
                convert(**fields)
            self.assertIn("security_context.seccomp", str(caught.exception))
            self.assertIn(word, str(caught.exception))
        for text, word in (
            ("{", "not JSON"),
            ("[" * 10**5, "not JSON"),
            ("[]", "object"),
            (" " * 10**6, "bytes"),
        ):
            with self.assertRaises(InvalidArgument) as caught:
                converted(text, DEFAULT, KERNEL)
            self.assertIn(word, str(caught.exception))

    @settings(max_examples=repetitions(30, 200), deadline=None)
    @given(st.dictionaries(st.sampled_from(_FIELDS), _JSON))
    def test_any_json_is_converted_or_refused(self, fields: Any) -> None:
        try:
            found = convert(**fields)
        except InvalidArgument as error:
            self.assertIn("security_context.seccomp", str(error))
            self.assertLess(len(str(error)), 400)
            return
        self.assertEqual(json.loads(json.dumps(found)), found)
