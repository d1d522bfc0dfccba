# SPDX-License-Identifier: Apache-2.0
"""A profile that crun has compiled is given to it again compiled, and confines as before."""

from __future__ import annotations

import base64
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase, TestCase

from infranetes_common.wire import cri
from tests.contract.container_semantics import SemanticsCase
from tests.harness.needs import needs_crun
from tests.vmserver.containers.oci.provider_case import OciCase
from vmserver.containers.interface import ExecResult
from vmserver.containers.oci.seccomp_filters import ANNOTATION, FILE, MOST, SeccompFilters

FILTER = bytes(range(16))


def spec(action: str = "SCMP_ACT_ERRNO", **more: Any) -> dict[str, Any]:
    """Return a part of a config.json, with a profile."""
    return {"linux": {"seccomp": {"defaultAction": action, "syscalls": []}}, **more}


class FilterTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="filters-"))
        self.addCleanup(shutil.rmtree, self.root)
        self.filters = SeccompFilters(self.root)

    def compiled(self, id: str, made: bytes) -> None:
        """Let crun have compiled a container's profile."""
        (self.root / id).mkdir()
        (self.root / id / FILE).write_bytes(made)

    def test_the_next_container_with_the_profile_has_its_filter_and_the_profile_too(self) -> None:
        self.assertEqual(self.filters.added(spec()), spec())
        self.compiled("c1", FILTER)
        self.filters.keep(spec(), "c1")
        added = self.filters.added(spec(process=1))
        self.assertEqual(base64.b64decode(added["annotations"].pop(ANNOTATION)), FILTER)
        self.assertEqual(added, spec(process=1, annotations={}))

    def test_only_the_same_profile_has_it(self) -> None:
        self.compiled("c1", FILTER)
        self.filters.keep(spec(), "c1")
        unconfined: dict[str, Any] = {"linux": {}}
        for other in (spec("SCMP_ACT_KILL"), unconfined, {"linux": {"seccomp": None}}):
            self.assertEqual(self.filters.added(other), other)

    def test_what_no_profile_has_made_is_nobodys(self) -> None:
        """An unconfined container has no filter. What is there nevertheless is another's."""
        self.compiled("c1", FILTER)
        self.filters.keep({"linux": {}}, "c1")
        self.assertEqual(self.filters.added({"linux": {}}), {"linux": {}})

    def test_what_is_no_whole_filter_is_not_kept(self) -> None:
        for number, made in enumerate((b"", FILTER[:-1], bytes(4097 * 8))):
            self.compiled(f"c{number}", made)
            self.filters.keep(spec(), f"c{number}")
        self.filters.keep(spec(), "gone")
        self.assertEqual(self.filters.added(spec()), spec())

    def test_no_more_than_some_are_remembered(self) -> None:
        profiles = [spec(f"SCMP_ACT_{number}") for number in range(MOST + 1)]
        for number, profile in enumerate(profiles):
            self.compiled(f"c{number}", FILTER)
            self.filters.keep(profile, f"c{number}")
        known = ["annotations" in self.filters.added(profile) for profile in profiles]
        self.assertEqual(known, [True] * MOST + [False])


@needs_crun
class ConfinementTests(OciCase, SemanticsCase, TestCase):
    """With crun itself."""

    async def confined(self, profile: cri.SecurityProfile, **context: Any) -> tuple[str, bytes, bool]:
        """Return a running container's id, its filter, and whether crun was given that."""
        security = cri.LinuxContainerSecurityContext(
            seccomp=profile, namespace_options=cri.NamespaceOption(pid=cri.CONTAINER), **context
        )
        linux = cri.LinuxContainerConfig(security_context=security)
        id = await self.run_container("sleep", "600", linux=linux)
        spec = json.loads((self.config.directory / "containers" / id / "bundle/config.json").read_text())
        self.assertTrue(spec["linux"]["seccomp"]["syscalls"])
        filter = (self.run_dir / "oci/crun" / id / FILE).read_bytes()
        return id, filter, ANNOTATION in spec.get("annotations", {})

    async def executed(self, id: str, *command: str) -> str:
        done: ExecResult = await self.provider.exec_sync(id, command, 30.0, 4000)
        return (done.stdout + done.stderr).decode()

    async def test_the_second_container_is_confined_by_the_firsts_filter(self) -> None:
        default = cri.SecurityProfile()
        _, made, given = await self.confined(default)
        self.assertFalse(given)
        id, again, given = await self.confined(default)
        self.assertEqual((again, given), (made, True))
        first = (await self.provider.containers())[-1].pid
        for status in (
            Path(f"/proc/{first}/status").read_text(),
            await self.executed(id, "cat", "/proc/self/status"),
        ):
            self.assertIn("Seccomp:\t2\nSeccomp_filters:\t", status)
        self.assertIn("Operation not permitted", await self.executed(id, "unshare", "-U", "true"))

    async def test_other_capabilities_or_another_profile_have_their_own(self) -> None:
        _, default, _ = await self.confined(cri.SecurityProfile())
        more = cri.Capability(add_capabilities=["SYS_ADMIN"])
        _, admin, given = await self.confined(cri.SecurityProfile(), capabilities=more)
        self.assertFalse(given)
        rules = [{"names": ["mkdir", "mkdirat"], "action": "SCMP_ACT_ERRNO", "errnoRet": 30}]
        text = json.dumps({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": rules})
        of_node = cri.SecurityProfile(profile_type=cri.SecurityProfile.Localhost, localhost_ref=text)
        for expected in (False, True):
            id, own, given = await self.confined(of_node)
            self.assertEqual(given, expected)
            self.assertIn("Read-only file system", await self.executed(id, "mkdir", "/x"))
        self.assertEqual(len({default, admin, own}), 3)

    async def test_the_init_of_a_pods_processes_has_one_too(self) -> None:
        given = []
        for _ in range(2):
            id = await self.run_container("sleep", "600")
            [init] = (self.config.directory / "init").iterdir()
            spec = json.loads((init / "config.json").read_text())
            given.append(ANNOTATION in spec.get("annotations", {}))
            pid = json.loads((self.run_dir / "oci/crun" / init.name / "status").read_text())["pid"]
            self.assertIn("Seccomp:\t2", Path(f"/proc/{pid}/status").read_text())
            await self.provider.remove(id)
        self.assertEqual(given, [False, True])
