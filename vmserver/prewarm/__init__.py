# SPDX-License-Identifier: Apache-2.0
"""Work that a template does once before it is frozen, so that its clones need not repeat it.

`first_call` loads the code that an agent's first RPC needs, `images` puts images into the engine,
`first_file_system` makes a file system, as for a blank volume, and `first_container` runs a container; a
clone that waits for a pod also does these last two. Each logs its failures and harms nothing. Finally, `heap`
lets the clones share the memory that the agent has filled by then.
"""

from __future__ import annotations

from twisted.internet.interfaces import IProtocolFactory

from infranetes_common.concurrency import run_in_thread
from infranetes_common.reactors import IReactor
from vmserver.containers.interface import IContainerProvider
from vmserver.prewarm.first_call import make_first_call
from vmserver.prewarm.first_container import WARMED, run_first_container
from vmserver.prewarm.first_file_system import make_first_file_system
from vmserver.prewarm.heap import keep_heap_shared
from vmserver.prewarm.images import load_images

__all__ = ["prewarm", "warm_up"]


async def prewarm(
    reactor: IReactor, factory: IProtocolFactory, provider: IContainerProvider, *, by_tls: bool = True
) -> None:
    """Do all of it.

    :param factory: of the agent's own gRPC server. :param by_tls: whether that is called by TLS.
    """
    await make_first_call(reactor, factory, by_tls=by_tls)
    if provider.name == "docker":
        await load_images(reactor, provider)
    await warm_up(reactor, provider)
    if provider.name == "oci":  # as the init of a pod's shared processes, and pods that are restricted
        await run_first_container(reactor, provider, ["ALL"])
    await run_in_thread(reactor, keep_heap_shared)


async def warm_up(reactor: IReactor, provider: IContainerProvider) -> None:
    """Do the first-time work that pods of containers would otherwise wait for."""
    if provider.name in WARMED:
        await make_first_file_system(reactor)
        await run_first_container(reactor, provider)
