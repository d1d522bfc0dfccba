# SPDX-License-Identifier: Apache-2.0
"""The test case of the suites for container providers: hooks for a provider, and helpers."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any, ClassVar

from twisted.internet.task import deferLater
from twisted.trial.unittest import TestCase

from infranetes_common.errors import (
    InfranetesError,
)
from infranetes_common.reactors import installed
from infranetes_common.wire import cri
from tests.support.dockerd import archive
from tests.support.oci import BuiltImage, busybox
from vmserver.containers.interface import IContainerProvider

reactor = installed()

if TYPE_CHECKING:
    _Base = TestCase
else:
    _Base = object

_built: list[BuiltImage] = []


def busybox_image() -> BuiltImage:
    """Return the image that the containers are made from."""
    if not _built:
        _built.append(busybox(extra={"etc/second": b"layer\n"}))
    return _built[0]


async def pieces(data: bytes, size: int = 65536) -> AsyncIterator[bytes]:
    """Yield `data` in pieces, as LoadImage receives it."""
    for at in range(0, len(data), size):
        yield data[at : at + size]


class ContainerProviderCase(_Base):
    """The base of the suites."""

    call_seconds: ClassVar[float] = 60.0
    notice_seconds: ClassVar[float] = 20.0
    huge_pages: ClassVar[int] = 8 << 20  # bytes that can be the limit of a container; 0: none can
    timeout = 240.0

    def build(self, extra: dict[str, bytes] | None = None) -> Any:
        """Build an image with an `id` and `diff_ids`: two layers, the second with the files `extra`."""
        return busybox_image() if extra is None else busybox(extra=extra)

    def archive(self, built: Any, present: int = 0) -> bytes:
        """Return the image as load_image takes it, without its lowest `present` layers."""
        return archive(built, present)

    def make_provider(self) -> IContainerProvider:
        """Return a provider, not started, on this test's state. An earlier one may still be running."""
        raise NotImplementedError

    async def setUp(self) -> None:
        self.providers: list[Any] = []
        self.told: list[tuple[str, Any]] = []
        self.built = self.build()
        self.image_id = self.built.id
        self.provider = await self.started()
        await self.load(self.built)

    async def load(self, built: Any) -> None:
        """Give the provider an image."""
        await self.provider.load_image(built.id, pieces(self.archive(built)))

    async def tearDown(self) -> None:
        last = await self.started()
        for state in await last.containers():
            await last.remove(state.id)
        for image in await last.images():
            await last.remove_image(image)
        self.assertEqual(await last.containers(), [])
        await self.all_heard()
        for provider in self.providers:
            await provider.stop()

    async def all_heard(self) -> None:
        """Wait until all that listened to containers have learned that these are gone."""

    async def started(self) -> Any:
        """Start a provider on this test's state, as a restarted agent does."""
        provider: Any = self.make_provider()
        self.providers.append(provider)
        provider.watch(
            lambda state: self.told.append((state.id, state)), lambda id: self.told.append((id, None))
        )
        await provider.start()
        return provider

    async def restarted(self) -> Any:
        """Stop the provider, and start another one on the same state, as a restart of the agent does."""
        await self.provider.stop()
        self.provider = await self.started()
        return self.provider

    async def create(self, *command: str, id: str = "", **fields: Any) -> str:
        """Create a container, which does not run yet; return its id."""
        id = id or secrets.token_hex(16)
        config = cri.ContainerConfig(command=command, **fields)
        state = await self.provider.create(id, self.image_id, config, cri.PodSandboxConfig())
        self.assertEqual((state.id, state.state), (id, cri.CONTAINER_CREATED))
        return id

    async def run_container(self, *command: str, **fields: Any) -> str:
        """Create and start a container; return its id."""
        id = await self.create(*command, **fields)
        await self.provider.start_container(id)
        return id

    async def state(self, id: str) -> Any:
        """Return a container's listed state; None: it is not listed."""
        found = [state for state in await self.provider.containers() if state.id == id]
        self.assertLessEqual(len(found), 1)
        return found[0] if found else None

    async def until(self, holds: Callable[[], Any], what: str, seconds: float = 0.0) -> None:
        """Wait for something to become true."""
        deadline = reactor.seconds() + (seconds or self.notice_seconds)
        while True:
            result = holds()
            if await result if hasattr(result, "__await__") else result:
                return
            if reactor.seconds() > deadline:
                self.fail(f"not in time: {what}")
            await deferLater(reactor, 0.05, lambda: None)

    async def ended(self, id: str) -> Any:
        """Wait until a container has ended, and return its state."""

        async def over() -> bool:
            state = await self.state(id)
            return state is not None and bool(state.state == cri.CONTAINER_EXITED)

        await self.until(over, f"container {id} has ended")
        return await self.state(id)

    async def refused(self, kind: type[InfranetesError], work: Any) -> str:
        """Assert that `work` is refused with this kind of error, and return the message."""
        try:
            result = await work
        except InfranetesError as error:
            self.assertIs(type(error), kind, str(error))
            self.assertTrue(str(error))
            return str(error)
        self.fail(f"not refused: {result!r}")

    async def lines(self, id: str, cursor: str = "", follow: bool = False) -> list[Any]:
        """Return the records of a container's log."""
        return [record async for record in self.provider.read_log(id, cursor, follow)]

    def states_told(self, id: str) -> list[Any]:
        """Return the states that were reported of a container, without repetitions; None: its removal."""
        found: list[Any] = []
        for which, state in self.told:
            value = None if state is None else state.state
            if which == id and (not found or found[-1] != value):
                found.append(value)
        return found
