# SPDX-License-Identifier: Apache-2.0
"""Images are sent as layers to simulated VMs, over the agents' TLS, as they are on clouds."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.threads import deferToThread

from infranetes_common.concurrency import settled, start
from infranetes_common.wire import cri
from tests.harness.durations import slow
from tests.harness.needs import needs_registry
from tests.infranetes.daemon.case import DaemonCase
from tests.support import oci
from tests.support.large_image import large
from tests.support.registry import Registry
from txgrpc import Code, GrpcError

MIB = 1024 * 1024
ARRIVING = 32, 8, 2  # an image that takes a moment to arrive, as `large` makes it


@slow(6, "images are made that take so long to arrive that this can be interrupted")
@needs_registry
class LayersTests(DaemonCase):
    """Simulated VMs that accept layers."""

    async def setUp(self) -> None:
        super().setUp()
        self.config["providers"]["simulated"]["images"] = "layers"

    async def start_with(self, **images: oci.BuiltImage) -> None:
        """Start the daemon; push and pull these images. `self.references` are then their references."""
        registry = await deferToThread(Registry().start)
        self.addCleanup(deferToThread, registry.stop)
        self.config["images"] = {"insecure_registries": [registry.host]}
        await self.start()
        self.references = {}
        for name, built in images.items():
            self.references[name] = await deferToThread(registry.push, name, "1", built)
            pull = cri.PullImageRequest(image=cri.ImageSpec(image=self.references[name]))
            await self.image_service.PullImage(pull, timeout=60.0)

    def of(self, image: str, container: str = "main", attempt: int = 0) -> Any:
        spec = cri.ImageSpec(image=self.references[image])
        return self.box(container, "sleep 1000", attempt, image=spec)

    def brought(self) -> Iterator[Path]:
        """Yield the files of layers in all VMs."""
        return self.root.rglob("fake/layers/*/*")

    def arriving(self) -> int:
        """Return how many bytes there are of layers that have not fully arrived."""
        return sum(path.stat().st_size for path in self.brought() if path.suffix == ".part")

    async def test_a_container_of_an_image_whose_layers_were_brought(self) -> None:
        await self.start()
        sandbox = await self.run_pod()
        container = await self.run_container(sandbox, self.box(script="echo hello; exit 3"))
        status = await self.in_state(container, cri.CONTAINER_EXITED)
        self.assertEqual(status.exit_code, 3)
        [layer] = self.brought()
        self.assertEqual(hashlib.sha256(layer.read_bytes()).hexdigest(), layer.name)

    async def test_a_pod_chooses_archives(self) -> None:
        await self.start()
        sandbox = await self.run_pod(annotations={"simulated.infranetes.io/images": "archives"})
        await self.run_container(sandbox, self.box(script="sleep 1000"))
        self.assertEqual(list(self.brought()), [])

    async def test_layers_that_images_share_are_brought_once(self) -> None:
        extra = {"etc/other": b"x"}
        await self.start_with(one=oci.busybox(), two=oci.busybox(extra=extra))
        sandbox = await self.run_pod()
        await self.run_container(sandbox, self.of("one"))
        [first] = self.brought()
        inode = first.stat().st_ino
        await self.run_container(sandbox, self.of("two", "second"))
        self.assertEqual(len(list(self.brought())), 2)
        self.assertEqual(first.stat().st_ino, inode)

    async def test_an_image_without_containers_leaves_the_vm_and_comes_again(self) -> None:
        self.config["times"] = {"unused_images": 0.2}
        await self.start()
        sandbox = await self.run_pod()
        for attempt in range(2):
            container = await self.run_container(sandbox, self.box(script="sleep 1000", attempt=attempt))
            self.assertEqual(len(list(self.brought())), 1)
            remove = cri.RemoveContainerRequest(container_id=container)
            await self.runtime.RemoveContainer(remove, timeout=20.0)
            await self.until(lambda: not list(self.brought()), "the layer is removed")

    async def test_pods_side_by_side_have_the_same_image(self) -> None:
        await self.start_with(large=large(8, 16, 4))
        names = [f"p{number}" for number in range(4)]
        sandboxes = [await self.run_pod(name) for name in names]
        runs = [start(self.run_container(sandbox, self.of("large"))) for sandbox in sandboxes]
        self.assertEqual(len({await run for run in runs}), 4)
        self.assertEqual(len(list(self.brought())), 4 * 5)

    async def test_what_has_arrived_is_not_sent_again_after_a_lost_connection(self) -> None:
        await self.start_with(large=large(*ARRIVING))
        sandbox = await self.run_pod()
        [vm] = await self.vms()
        creating = start(self.create(sandbox, self.of("large")))
        await self.until(lambda: self.arriving() > 2 * MIB, "the layers are arriving", 30.0)
        await self.farm("behave", id=vm["id"], behaviour="normal", after=0)  # closes its connections
        await creating
        self.assertIn("continues at", self.log)

    async def test_the_next_daemon_goes_on_with_what_has_arrived(self) -> None:
        await self.start_with(large=large(*ARRIVING))
        sandbox = await self.run_pod()
        creating = start(self.create(sandbox, self.of("large")))
        await self.until(lambda: self.arriving() > 2 * MIB, "the layers are arriving", 30.0)
        await self.restart()
        await settled([creating])
        container = await self.run_container(sandbox, self.of("large"))
        self.assertIn("continues at", self.log)
        self.assertEqual([one.id for one in await self.containers()], [container])

    async def test_a_call_that_has_run_out_of_time_is_joined_by_the_next(self) -> None:
        await self.start_with(large=large(*ARRIVING))
        sandbox = await self.run_pod()
        request = cri.CreateContainerRequest(pod_sandbox_id=sandbox, config=self.of("large"))
        await self.refused(Code.DEADLINE_EXCEEDED, self.runtime.CreateContainer(request, timeout=0.1))
        container = await self.run_container(sandbox, self.of("large"))
        self.assertEqual([one.id for one in await self.containers()], [container])

    async def test_a_pod_that_is_stopped_ends_what_is_arriving(self) -> None:
        await self.start_with(large=large(*ARRIVING))
        sandbox = await self.run_pod()
        creating: Deferred[str] = start(self.create(sandbox, self.of("large")))
        await self.until(lambda: self.arriving() > 2 * MIB, "the layers are arriving", 30.0)
        await self.remove_pod(sandbox)
        [result] = await settled([creating])
        self.assertIsInstance(getattr(result, "value", None), GrpcError)
        self.assertEqual(await self.vms(), [])
