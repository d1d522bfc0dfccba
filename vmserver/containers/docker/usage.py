"""What Docker's containers use. Docker itself is not asked: it need not answer, and is not held up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
from twisted.internet.threads import deferToThreadPool

from infranetes_common import vmserver as messages
from vmserver.stats import container
from vmserver.stats.written import WrittenLayers


@attrs.frozen
class Traces:
    """Where a container's figures are found."""

    engine_id: str = ""  # Docker's own id, which the control group's name has in it
    layer: str = ""  # the directory of what it wrote over its image; "": not known

    @classmethod
    def of(cls, found: Any) -> Traces:
        """From ContainerInspect's JSON. Only overlay2 has a directory of nothing but the container's own."""
        layer = ((found.get("GraphDriver") or {}).get("Data") or {}).get("UpperDir", "")
        return cls(str(found.get("Id", "")), str(layer))


class Usages:
    """Measures in a thread."""

    def __init__(self, reactor: Any) -> None:
        self._reactor = reactor
        self._written = WrittenLayers(reactor)

    async def of(self, known: Mapping[str, tuple[Any, Traces]]) -> list[Any]:
        """The ContainerUsage of each of these (ContainerState and Traces by id)."""
        pool = self._reactor.getThreadPool()
        measured = await deferToThreadPool(self._reactor, pool, _thd_measure, dict(known))
        written = await self._written.of(
            {id: traces.layer for id, (_, traces) in known.items() if traces.layer}
        )
        return [
            messages.ContainerUsage(
                id=id, started_at=state.started_at, usage=measured.get(id), written=written.get(id)
            )
            for id, (state, _) in known.items()
        ]

    def stop(self) -> None:
        """Count no more. Twice is once."""
        self._written.stop()


def _thd_measure(known: Mapping[str, tuple[Any, Traces]]) -> dict[str, Any]:
    found = {}
    for id, (state, traces) in known.items():
        if state.pid:
            usage = container.usage(state.pid, state.resources.memory_limit_in_bytes, traces.engine_id)
            if usage is not None:
                found[id] = usage
    return found
