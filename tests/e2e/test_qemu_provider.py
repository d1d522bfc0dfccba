"""QEMU's VMs, real ones: the contract of every provider, and what only this one does."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.defer import Deferred, gatherResults
from twisted.trial.unittest import TestCase

from infranetes.guest.image import DEFAULT_DIR, current
from infranetes.providers.interface import Instance, InstanceState, Size
from infranetes.providers.qemu import record
from infranetes.providers.qemu.machine import Machine
from infranetes.providers.qemu.network import Network, Port
from infranetes.providers.qemu.process import named
from infranetes.providers.qemu.settings import QemuSettings
from infranetes.providers.qemu.template import Template, TemplateMaker
from infranetes_common import vmserver
from infranetes_common.errors import (
    FailedPrecondition,
    InfranetesError,
    InvalidArgument,
    ResourceExhausted,
    Unavailable,
)
from tests.contract.pod_provider import LeasedAddressContract, PodProviderContract
from tests.contract.pod_provider_case import ProviderCase, reactor
from txgrpc import GrpcError

IMAGES = Path(os.environ.get("INFRANETES_TEST_IMAGES", DEFAULT_DIR))
# One template for all tests, and for the next run's: a boot takes minutes where there is no KVM.
TEMPLATES = Path(os.environ.get("INFRANETES_TEST_TEMPLATES", "/var/lib/infranetes/test-templates"))
BRIDGE = "inftest0"
QEMU = "/usr/bin/qemu-system-x86_64"


def said(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


_START = """
import json, sys
from pathlib import Path
from twisted.internet.defer import Deferred
from twisted.internet.task import react
from infranetes.providers import registry
from infranetes.providers.interface import ProviderContext

def main(reactor):
    context = ProviderContext(Path(sys.argv[1]), Path(sys.argv[2]), "c", "n")
    return registry.create(reactor, "qemu", json.loads(sys.argv[3]), context).start(lambda words: None)

react(main)
"""


class QemuCase(ProviderCase):
    provider_name = "qemu"
    start_timeout = 900.0
    boot_timeout = 90.0
    agent_timeout = 60.0
    call_timeout = 90.0
    notice_timeout = 30.0
    interrupt_after = (0.0, 0.05, 0.3)
    timeout = 1800.0

    def setUp(self) -> Any:
        self.settings: dict[str, Any] = {
            "bridge": BRIDGE,
            "image_dir": str(IMAGES),
            "template_dir": str(TEMPLATES),
            "pod_cidr": self.pod_cidr,
        }
        # A home, which this tree may be in, is closed to QEMU's user.
        self.open_dir = Path(tempfile.mkdtemp(prefix="infranetes-"))
        return super().setUp()

    def table(self) -> Mapping[str, Any]:
        return self.settings

    def vms(self) -> Path:
        return self.state_dir / "qemu" / "vms"

    def pids(self, instance: Instance) -> list[int]:
        name = f"guest=infranetes-{instance.token}"
        return named([name]).get(name, [])

    async def end_from_outside(self, instance: Instance) -> None:
        [pid] = self.pids(instance)
        os.kill(pid, signal.SIGKILL)

    def wrapper(self, body: str) -> str:
        """A QEMU of which `body`, a piece of shell, has the arguments first."""
        self.open_dir.chmod(0o755)
        path = self.open_dir / f"qemu-{secrets.token_hex(4)}"
        path.write_text(f'#!/bin/bash\n{body}\nexec {QEMU} "$@"\n')
        path.chmod(0o755)
        return str(path)

    def break_launches(self) -> Callable[[], None]:
        """QEMU gets nothing to read where the template's state should be."""
        self.settings["qemu"] = self.wrapper('case "$*" in *defer*) exec 4</dev/null;; esac')
        return lambda: self.settings.pop("qemu")

    def leftovers(self) -> list[str]:
        left = [f"directory {path}" for path in self.vms().iterdir()]
        left += [f"socket {path}" for path in (self.run_dir / "qemu").iterdir()]
        for link in json.loads(said("ip", "-j", "link", "show", "master", BRIDGE)):
            left.append(f"tap {link['ifname']}")
        table = said("nft", "list", "table", "bridge", f"infranetes_{BRIDGE}")
        if "elements" in table:
            left.append(f"leases {table}")
        for arguments in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = arguments.read_bytes().split(b"\0")
            except OSError:
                continue
            if any(word.startswith(b"guest=infranetes-") for word in words):
                parent = arguments.parent
                if os.path.samefile(f"/proc/{os.getpid()}/ns/net", parent / "ns/net") and self.mine(parent):
                    left.append(f"process {parent.name}")
        return left

    def mine(self, process: Path) -> bool:
        """Whether it has a file of this test open."""
        try:
            return any(
                os.readlink(each).startswith(str(self.state_dir)) for each in (process / "fd").iterdir()
            )
        except OSError:
            return False

    async def finish(self) -> None:
        shutil.rmtree(self.open_dir)
        await Network(reactor, BRIDGE, 0).remove()


class QemuContractTests(QemuCase, PodProviderContract, LeasedAddressContract, TestCase):
    """What every provider does."""


class QemuTests(QemuCase, TestCase):
    """What only this provider does."""

    async def test_qemu_runs_without_any_right_and_can_open_nothing(self) -> None:
        provider = await self.started()
        instance = await self.running(provider, self.spec())
        [pid] = self.pids(instance)
        status = Path(f"/proc/{pid}/status").read_text()
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        self.assertNotIn("0", fields["Uid"].split())
        self.assertEqual({fields[each].strip("0") for each in ("CapEff", "CapPrm", "CapBnd", "CapAmb")}, {""})
        self.assertEqual((fields["NoNewPrivs"], fields["Seccomp"]), ("1", "2"))

    async def test_a_size_is_had(self) -> None:
        """Memory and processors beyond the template's are plugged into the copy."""
        self.settings["max_cpus"] = 2
        provider = await self.started()
        size = Size(cpu_millis=1500, memory_bytes=1536 << 20)
        instance = await self.running(provider, self.spec(size=size))

        async def grown() -> bool:
            info = await self.agent_info(instance)
            return bool(info.cpus == 2 and info.memory_bytes >= size.memory_bytes)

        deadline = reactor.seconds() + self.notice_timeout
        while not await grown():
            self.assertLess(reactor.seconds(), deadline, "the guest takes memory and processor into use")
            await self.sleep(0.5)

    async def test_each_vm_is_held_to_its_own_address(self) -> None:
        provider = await self.started()
        instances = await gatherResults(
            [Deferred.fromCoroutine(self.running(provider, self.spec())) for _ in range(2)],
            consumeErrors=True,
        )
        self.assertEqual(provider.status()["pods held to their addresses"], "yes")
        table = said("nft", "list", "table", "bridge", f"infranetes_{BRIDGE}")
        for instance in instances:
            self.assertIn(instance.address, table)
            await self.agent_info(instance)
        # Whoever has no lease any more is not heard.
        port = Port(f"inf{instances[0].token[:12]}", instances[0].address)
        table = f"infranetes_{BRIDGE}"
        said("nft", "delete", "element", "bridge", table, "pods", f"{{ {port.element} }}")
        unheard = self.agent(instances[0])
        await self.assertFailure(unheard.Info(vmserver.InfoRequest(), timeout=3.0), GrpcError)
        await self.agent_info(instances[1])

    async def test_copies_differ_in_all_that_tells_machines_apart(self) -> None:
        provider = await self.started()
        specs = [self.spec(), self.spec()]
        instances = [await self.running(provider, spec) for spec in specs]
        infos = [await self.agent_info(instance) for instance in instances]
        self.assertEqual([info.sandbox_id for info in infos], [spec.sandbox_id for spec in specs])
        self.assertNotEqual(infos[0].boot_id, infos[1].boot_id)
        self.assertNotEqual(instances[0].address, instances[1].address)

    async def test_a_refusing_agent_ends_the_vm_with_its_words(self) -> None:
        provider = await self.started()
        ended: list[Instance] = []
        provider.watch(ended.append)
        spec = self.spec()
        spec = attrs.evolve(spec, identity=attrs.evolve(spec.identity, certificate_pem="nonsense"))
        launched = await self.within(provider.launch(spec))
        error = await self.refused(Unavailable, provider.wait_running(launched.id, self.boot_timeout))
        self.assertIn("identity", str(error))
        self.assertEqual(self.pids(launched), [])
        [listed] = await provider.list()
        self.assertIs(listed.state, InstanceState.ENDED)
        self.assertEqual([one.id for one in ended], [launched.id])

    async def test_an_agent_that_says_nothing_ends_the_vm_in_time(self) -> None:
        self.settings["boot_timeout"] = 0.1
        provider = await self.started()
        launched = await self.within(provider.launch(self.spec()))
        error = await self.refused(Unavailable, provider.wait_running(launched.id, self.boot_timeout))
        self.assertIn("did not take its identity on in 0.1 s", str(error))

    async def test_each_step_that_fails_leaves_nothing(self) -> None:
        provider = await self.started()
        await provider.stop()
        for body, words in (
            ('case "$*" in *defer*) echo out of luck >&2; exit 1;; esac', "out of luck"),
            ('case "$*" in *defer*) exec 5<&-;; esac', ""),  # no disk
            ('case "$*" in *defer*) exec 3<>/dev/null;; esac', ""),  # no memory
            ('case "$*" in *defer*) exec 11</dev/null;; esac', ""),  # no tap
            ('case "$*" in *defer*) exec sleep 67.5;; esac', "QEMU did not answer"),
        ):
            self.settings.update(qemu=self.wrapper(body), launch_timeout=3.0)
            provider = await self.started()
            error = await self.refused(InfranetesError, provider.launch(self.spec()))
            self.assertIn(words, str(error))
            self.assertEqual(await provider.list(), [])
            await provider.stop()
            self.assertEqual(self.leftovers(), [])

    async def test_a_step_on_the_node_that_fails_leaves_nothing(self) -> None:
        provider: Any = await self.started()
        launcher = provider._launcher
        full = OSError(28, "No space left on device")

        def refuse(*_: Any) -> Any:
            raise full

        for holder, name, error in (
            (launcher._records, "add", ResourceExhausted),
            (launcher._net, "allow", ResourceExhausted),
            (launcher._net, "join", ResourceExhausted),
        ):
            patch = self.patch(holder, name, refuse)
            await self.refused(error, provider.launch(self.spec()))
            patch.restore()
            self.assertEqual(await provider.list(), [])
            self.assertEqual(self.leftovers(), [])
        await self.running(provider, self.spec())

    async def test_without_a_guest_image_the_start_says_how_to_make_one(self) -> None:
        self.settings["image_dir"] = str(self.state_dir / "none")
        error = await self.refused(FailedPrecondition, self.make_provider().start(lambda words: None))
        self.assertIn("make image", str(error))
        self.assertIn("infranetes-guest build", str(error))
        self.settings["image_dir"] = str(IMAGES)

    async def test_a_bridge_of_somebody_else_is_refused_at_the_start(self) -> None:
        said("ip", "link", "add", "name", BRIDGE, "type", "bridge")
        error = await self.refused(FailedPrecondition, self.make_provider().start(lambda words: None))
        self.assertIn("providers.qemu.bridge", str(error))
        said("ip", "link", "delete", "dev", BRIDGE)

    async def test_a_second_daemon_on_the_same_state_is_refused(self) -> None:
        provider = await self.started()
        await self.refused(FailedPrecondition, self.make_provider().start(lambda words: None))
        await provider.stop()

    async def test_the_end_of_a_vm_comes_with_a_reason(self) -> None:
        provider = await self.started()
        instance = await self.running(provider, self.spec())
        monitor = socket.socket(socket.AF_UNIX)
        # QEMU takes one client at a time: the daemon's is given up first.
        provider = await self.restarted(provider)
        ended: list[Instance] = []
        provider.watch(ended.append)
        with monitor:
            monitor.connect(str(self.run_dir / "qemu" / instance.token / "qmp"))
            monitor.sendall(b'{"execute": "qmp_capabilities"}\n{"execute": "quit"}\n')
            await self.until(lambda: ended, "the end is told")
        self.assertTrue(ended[0].detail)

    async def test_the_console_is_kept_for_diagnosis(self) -> None:
        provider = await self.started()
        instance = await self.running(provider, self.spec())
        self.assertTrue((self.vms() / instance.token / record.CONSOLE).is_file())

    async def test_what_can_not_be_undone_stays_in_sight(self) -> None:
        provider: Any = await self.started()
        net = provider._launcher._net

        async def refuse(*_: Any) -> None:
            raise InfranetesError("no netlink today")

        spec = self.spec()
        patches = [self.patch(net, name, refuse) for name in ("join", "forbid")]
        error = await self.refused(InfranetesError, provider.launch(spec))
        self.assertIn("no netlink today", str(error))
        [listed] = await provider.list()
        self.assertIs(listed.state, InstanceState.ENDED)
        self.assertIn("nor undone", listed.detail)
        self.assertEqual(self.pids(listed), [])
        await self.refused(InfranetesError, provider.destroy(listed.id))
        for patch in patches:
            patch.restore()
        await self.within(provider.destroy(listed.id))
        self.assertEqual(await provider.list(), [])

    async def test_a_daemon_killed_while_it_makes_the_template_leaves_nothing_that_matters(self) -> None:
        templates = self.state_dir / "templates"
        table = {**self.settings, "template_dir": str(templates), "memory": 300 << 20}
        child = subprocess.Popen(
            [
                sys.executable,
                "-c",
                _START,
                str(self.state_dir / "other"),
                str(self.run_dir),
                json.dumps(table),
            ],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
        try:
            await self.until(lambda: any(templates.glob(".build-*/ram")), "the template is begun", 60.0)
            [work] = templates.glob(".build-*")
            name = f"guest=infranetes-template-{work.name.removeprefix('.build-')}"
            await self.until(lambda: name in named([name]), "QEMU boots it", 60.0)
        finally:
            child.kill()
            child.wait()
        await self.until(lambda: name not in named([name]), "QEMU ends with its daemon", 10.0)
        maker = TemplateMaker(reactor, QemuSettings(), templates, self.run_dir, (0, 0, []))
        machine = Machine(QEMU, "x", "tcg", 300, 300, 1)
        await maker._sweep(Template(templates / "other", machine, current(IMAGES)))
        self.assertEqual(list(templates.glob(".build-*")), [])

    async def test_words_of_requests_that_can_not_be(self) -> None:
        provider = await self.started()
        for token in ("", "x", "../" * 8, "A" * 32):
            await self.refused(InvalidArgument, provider.launch(self.spec(token=token)))

    async def test_the_agents_port_is_the_agents(self) -> None:
        provider = await self.started()
        instance = await self.running(provider, self.spec())
        info = await self.agent(instance).Info(vmserver.InfoRequest(), timeout=30.0)
        self.assertEqual(info.container_provider, "docker")
        self.assertLess(abs(info.now_nanos - time.time_ns()), 2 * 10**9, "its clock is the node's")
