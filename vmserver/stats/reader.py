# SPDX-License-Identifier: Apache-2.0
"""Resource usage of containers, measured in the kernel's files without asking their engine."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from infranetes_common.concurrency import run_in_thread
from infranetes_common.reactors import IReactor
from infranetes_common.wire import vmserver as messages
from vmserver.stats import container
from vmserver.stats.written import WrittenLayers


@attrs.frozen
class UsageSource:
    """The places to measure a container's usage."""

    group: str = ""  # a part of its control group's name that no other group has
    layer: str = ""  # the directory of the files that it wrote over its image; "" if not known


class UsageReader:
    """Measures containers in a thread."""

    def __init__(self, reactor: IReactor) -> None:
        self._reactor = reactor
        self._written = WrittenLayers(reactor)

    async def read(
        self, containers: Mapping[str, tuple[messages.ContainerState, UsageSource]]
    ) -> list[messages.ContainerUsage]:
        """Return the usage of each of these containers."""
        measured = await run_in_thread(self._reactor, _thd_measure, dict(containers))
        written = await self._written.of(
            {id: source.layer for id, (_, source) in containers.items() if source.layer}
        )
        return [
            messages.ContainerUsage(
                id=id, started_at=state.started_at, usage=measured.get(id), written=written.get(id)
            )
            for id, (state, _) in containers.items()
        ]

    def stop(self) -> None:
        """Stop counting. Idempotent."""
        self._written.stop()


def _thd_measure(
    containers: Mapping[str, tuple[messages.ContainerState, UsageSource]],
) -> dict[str, messages.Usage]:
    found = {}
    for id, (state, source) in containers.items():
        if state.pid:
            usage = container.usage(state.pid, max(state.resources.memory_limit_in_bytes, 0), source.group)
            if usage is not None:
                found[id] = usage
    return found
