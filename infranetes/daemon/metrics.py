# SPDX-License-Identifier: Apache-2.0
"""The daemon's metrics, where the configuration has an address for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infranetes.config import Config
from infranetes.monitoring.gauges import ShownNode
from infranetes.observer import NULL_OBSERVER, Observer
from infranetes_common.reactors import IReactor

if TYPE_CHECKING:
    from infranetes.monitoring.metrics import Metrics
    from infranetes.monitoring.service import Monitoring

# The modules that serve metrics are imported only where they are used: without them the daemon is smaller.


def make_observer(config: Config) -> tuple[Observer, Metrics | None]:
    """Return the observer of everything that happens, and the metrics that it counts, if they are served."""
    if not config.metrics.listen:
        return NULL_OBSERVER, None
    from infranetes.monitoring.metrics import Metrics

    metrics = Metrics()
    return metrics, metrics


def monitoring(reactor: IReactor, config: Config, shown: ShownNode, metrics: Metrics) -> Monitoring:
    """Return the service that serves them."""
    from infranetes.monitoring.service import Monitoring

    return Monitoring(reactor, config.metrics, shown, metrics)
