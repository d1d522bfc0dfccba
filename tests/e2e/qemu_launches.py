# SPDX-License-Identifier: Apache-2.0
"""What the QEMU provider promises of launches beyond the contract."""

from __future__ import annotations

import socket
from typing import Any

import attrs

from infranetes.providers.interface import Instance, InstanceState
from infranetes.providers.qemu.vm import record
from infranetes_common.errors import (
    FailedPrecondition,
    InfranetesError,
    InvalidArgument,
    ResourceExhausted,
    Unavailable,
)
from tests.e2e.qemu_case import QemuCase, said
from tests.harness.durations import slow


class QemuLaunches(QemuCase):
    """Launches, what makes them fail, and what is left of them."""

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

    @slow(8, "of one step only the time tells that it has failed")
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
            (provider._pod_network.bridge, "allow", ResourceExhausted),
            (provider._pod_network.bridge, "join", ResourceExhausted),
        ):
            patch = self.patch(holder, name, refuse)
            await self.refused(error, provider.launch(self.spec()))
            patch.restore()
            self.assertEqual(await provider.list(), [])
            self.assertEqual(self.leftovers(), [])
        await self.running(provider, self.spec())

    async def test_without_a_guest_image_the_start_says_how_to_make_one(self) -> None:
        image_dir = self.settings["image_dir"]
        self.settings["image_dir"] = str(self.state_dir / "none")
        try:
            error = await self.refused(Unavailable, self.make_provider().start(lambda words: None))
        finally:
            self.settings["image_dir"] = image_dir
        self.assertIn("make image", str(error))
        self.assertIn("infranetes-guest build", str(error))

    async def test_a_bridge_of_somebody_else_is_refused_at_the_start(self) -> None:
        said("ip", "link", "add", "name", self.bridge, "type", "bridge")
        error = await self.refused(FailedPrecondition, self.make_provider().start(lambda words: None))
        self.assertIn("providers.qemu.bridge", str(error))
        said("ip", "link", "delete", "dev", self.bridge)

    async def test_a_second_daemon_on_the_same_state_is_refused(self) -> None:
        provider = await self.started()
        await self.refused(FailedPrecondition, self.make_provider().start(lambda words: None))
        await provider.stop()

    async def test_the_end_of_a_vm_comes_with_a_reason(self) -> None:
        provider = await self.started()
        instance = await self.running(provider, self.spec())
        monitor = socket.socket(socket.AF_UNIX)
        # QEMU accepts one client at a time, so the daemon's connection is closed first.
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

    async def test_what_can_not_be_torn_down_stays_listed(self) -> None:
        provider: Any = await self.started()
        bridge = provider._pod_network.bridge

        async def refuse(*_: Any) -> None:
            raise InfranetesError("no netlink today")

        spec = self.spec()
        patches = [self.patch(bridge, name, refuse) for name in ("join", "forbid")]
        error = await self.refused(InfranetesError, provider.launch(spec))
        self.assertIn("no netlink today", str(error))
        [listed] = await provider.list()
        self.assertIs(listed.state, InstanceState.ENDED)
        self.assertIn("nor torn down", listed.detail)
        self.assertEqual(self.pids(listed), [])
        await self.refused(InfranetesError, provider.destroy(listed.id))
        for patch in patches:
            patch.restore()
        await self.within(provider.destroy(listed.id))
        self.assertEqual(await provider.list(), [])

    async def test_words_of_requests_that_can_not_be(self) -> None:
        provider = await self.started()
        spec = self.spec(annotations={"infranetes.io/gpus": "1"})
        self.assertIn("gpus", str(await self.refused(InvalidArgument, provider.launch(spec))))
        for token in ("", "x", "../" * 8, "A" * 32):
            await self.refused(InvalidArgument, provider.launch(self.spec(token=token)))
