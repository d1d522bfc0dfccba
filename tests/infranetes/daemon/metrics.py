# SPDX-License-Identifier: Apache-2.0
"""Daemons whose metrics are served."""

from __future__ import annotations

import re

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.infranetes.daemon.case import DaemonCase
from tests.infranetes.monitoring.client import get

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


class MetricsCase(DaemonCase):
    """A daemon that serves its metrics."""

    def setUp(self) -> None:
        super().setUp()
        self.config["metrics"] = {"listen": "127.0.0.1:0", "page": True}

    @property
    def url(self) -> str:
        """The URL at which the last daemon serves its metrics."""
        return str(re.findall(r"metrics are served on (http\S+/)metrics", self.log)[-1])

    async def families(self) -> list[Metric]:
        """Return the metrics that are exposed now."""
        return list(text_string_to_metric_families((await get(self.url + "metrics")).body))

    async def samples(self) -> Samples:
        """Return their values by name and labels."""
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in await self.families()
            for sample in family.samples
        }

    async def value(self, name: str, **labels: str) -> float:
        """Return the value of one sample."""
        return (await self.samples())[f"infranetes_{name}", frozenset(labels.items())]
