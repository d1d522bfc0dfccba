# SPDX-License-Identifier: Apache-2.0
"""Images brought into the VMs of sandboxes."""

from __future__ import annotations

from twisted.logger import Logger

from infranetes.images import Image
from infranetes.pods.context import NodeContext
from infranetes.pods.inventory import Sandbox
from infranetes_common.concurrency import Flight

_log = Logger()


async def load_image(node: NodeContext, sandbox: Sandbox, image: Image) -> None:
    """Bring the image into the VM unless it is there. Callers that want the same one share its load."""
    flight = sandbox.loads.get(image.id)
    if flight is None or flight.done:
        flight = sandbox.loads[image.id] = Flight(_load(node, sandbox, image))
    try:
        await flight.join()
    finally:
        if flight.done and sandbox.loads.get(image.id) is flight:
            del sandbox.loads[image.id]


async def _load(node: NodeContext, sandbox: Sandbox, image: Image) -> None:
    agent = sandbox.agent()
    if image.machine or image.id in await agent.images():
        return
    began = node.clock.seconds()
    if image.url:
        await agent.fetch_image(image.id, image.url)
        return
    present = await agent.missing_layers(image.diff_ids)
    await agent.load_image(image.id, node.images.archive(image.id, present))
    _log.info(
        "image {image} loaded into sandbox {sandbox}, {present} of {layers} layers were there: "
        "{seconds:.2f} s",
        image=image.id,
        sandbox=sandbox.id,
        present=present,
        layers=len(image.diff_ids),
        seconds=node.clock.seconds() - began,
    )
