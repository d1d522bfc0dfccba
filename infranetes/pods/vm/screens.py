# SPDX-License-Identifier: Apache-2.0
"""The screens of VMs, with deadlines and bounds: what a hypervisor says of one is not trusted."""

from __future__ import annotations

from twisted.internet.interfaces import IReactorTime

from infranetes.providers.hypervisor import IHypervisor
from infranetes_common.byte_connection import ByteConnection, connected
from infranetes_common.concurrency import start, within
from infranetes_common.errors import InfranetesError, ResourceExhausted, Unavailable

MOST_BYTES = 32 * 2**20  # of a picture
PICTURE_SECONDS = 30.0
CONNECT_SECONDS = 10.0


async def screenshot(clock: IReactorTime, hypervisor: IHypervisor) -> bytes:
    """Return what the screen shows, as PNG.

    :raise NotOffered: there is no screen. :raise ResourceExhausted: the picture is too large.
    :raise Unavailable, DeadlineExceeded: try again."""
    png: bytes = await within(
        clock, PICTURE_SECONDS, hypervisor.screenshot(), "the picture of the VM's screen"
    )
    if len(png) > MOST_BYTES:
        raise ResourceExhausted(
            f"the picture of the VM's screen is over {MOST_BYTES >> 20} MiB: have the guest use a lower "
            "resolution"
        )
    return png


async def screen_of(clock: IReactorTime, hypervisor: IHypervisor) -> ByteConnection:
    """Connect to screen and keyboard.

    :raise NotOffered: there are none. :raise Unavailable, DeadlineExceeded: try again."""
    connecting = start(connected(hypervisor.screen(), "the VM's screen"))
    try:
        return await within(clock, CONNECT_SECONDS, connecting, "the connection to the VM's screen")
    except InfranetesError:
        raise
    except Exception as error:
        raise Unavailable(f"the VM's screen can't be connected to: {error}; try again") from None
