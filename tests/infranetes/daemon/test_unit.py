# SPDX-License-Identifier: Apache-2.0
"""What the daemon can do with volumes inside the unit's sandbox."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from infranetes.volumes.mounts import Source
from infranetes_common.wire import cri
from tests.harness.needs import needs_systemd
from tests.infranetes.daemon.case import ROOT
from tests.infranetes.daemon.unit import UnitCase, UnitProgram

GROUP = 2000

# Tries what the provider tries when it starts, then reads a namespace that is made in the meantime.
_JOINS = """
import sys
from pathlib import Path
from twisted.internet import reactor
from twisted.internet.defer import Deferred
from infranetes.providers.interface import Attachment
from infranetes.providers.qemu.network.namespaces import Namespaces
from infranetes_common.concurrency import sleep
from infranetes_common.errors import InfranetesError

async def main(path, spaces):
    try:
        await spaces.self_test()
        print("ready", flush=True)
        while not path.with_suffix(".made").exists():
            await sleep(reactor, 0.05)
        print((await spaces.read(Attachment(path))).address)
    except InfranetesError as error:
        print(error)
    reactor.stop()

work = main(Path(sys.argv[1]), Namespaces(reactor))
reactor.callWhenRunning(lambda: Deferred.fromCoroutine(work))
reactor.run()
"""


@needs_systemd
class WriteBackTests(UnitCase):
    async def test_what_a_job_wrote_into_an_fsgroup_volume_is_there_when_its_end_is_told(self) -> None:
        await self.start()
        shared = Path(os.path.realpath(self.root)) / "shared"
        shared.mkdir()
        os.chown(shared, 0, GROUP)
        shared.chmod(0o2775)  # like kubelet's volume for a pod with an fsGroup
        there = f"$(find {self.root} -path '*{Source(str(shared), False, False).id}/directory')"
        script = (
            f"cd {there} && umask 002 && mkdir -p out/deep && echo 42 >out/deep/result && "
            "cp /bin/true program && chmod 6755 program && mkdir last && echo done >last/file; exit 3"
        )
        mounts = [cri.Mount(container_path="/out", host_path=str(shared))]
        container = await self.run_container(await self.run_pod(), self.box(script=script, mounts=mounts))
        status = await self.in_state(container, cri.CONTAINER_EXITED)
        self.assertEqual((status.exit_code, status.reason, status.message), (3, "Error", ""))
        self.assertEqual((shared / "out" / "deep" / "result").read_text(), "42\n")
        self.assertEqual((shared / "last" / "file").read_text(), "done\n")
        for path in (shared, shared / "out", shared / "out" / "deep", shared / "last"):
            found = path.stat()
            self.assertEqual((stat.S_IMODE(found.st_mode), found.st_gid), (0o2775, GROUP), path)
        program = (shared / "program").stat()
        self.assertEqual(stat.S_IMODE(program.st_mode), 0o755)  # files from a machine lose their set-id bits


@needs_systemd
class NamespaceTests(TestCase):
    """Network namespaces that others, such as a CNI plugin, make while the unit runs."""

    timeout = 300

    async def test_the_unit_joins_them_with_its_drop_in_alone(self) -> None:
        program = UnitProgram(_JOINS)
        self.addCleanup(program.remove)
        name = f"unit-{secrets.token_hex(4)}"
        path = f"/run/netns/{name}"

        def without() -> str:
            program.start(path)
            return program.finished()

        self.assertIn("it needs CAP_SYS_ADMIN", await deferToThread(without))

        def with_it() -> str:
            program.add(ROOT / "docs" / "systemd-cni.conf")
            program.start(path)
            program.says("ready")
            for words in (
                f"ip netns add {name}",
                f"ip -n {name} link add eth0 type veth peer name other",
                f"ip -n {name} address add 10.4.0.7/24 dev eth0",
                f"ip -n {name} link set other up",
                f"ip -n {name} link set eth0 up",
                f"touch /run/netns/{name}.made",
            ):
                program.run(*words.split())
            try:
                return program.finished()
            finally:
                program.run("ip", "netns", "delete", name)

        self.assertIn("10.4.0.7/24", await deferToThread(with_it))
