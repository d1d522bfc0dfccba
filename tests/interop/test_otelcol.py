# SPDX-License-Identifier: Apache-2.0
"""OpenTelemetry's own collector takes a daemon's spans, and hands on what the daemon recorded."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

from twisted.internet.threads import deferToThread

from tests.harness.needs import Tier, needs, tool
from tests.infranetes.daemon import test_tracing
from tests.infranetes.daemon.case import ROOT

OTELCOL = ROOT / "build" / "tools" / "otelcol"
CONFIG = """\
receivers:
  otlp:
    protocols:
      http:
        endpoint: 127.0.0.1:{port}
exporters:
  otlp_http:
    traces_endpoint: {onward}
    compression: none
service:
  telemetry:
    metrics:
      level: none
  pipelines:
    traces:
      receivers: [otlp]
      exporters: [otlp_http]
"""


@needs(tool("otelcol", Tier.NIGHTLY, "otelcol"))
class OtelcolTests(test_tracing.TraceTests):
    """What a call is seen to consist of, by a collector that others wrote."""

    def before(self, collector: str) -> str:
        with socket.socket() as lent:
            lent.bind(("127.0.0.1", 0))
            port = lent.getsockname()[1]
        config, log = Path(self.mktemp()), Path(self.mktemp())
        config.write_text(CONFIG.format(port=port, onward=collector))
        with log.open("wb") as out:
            process = subprocess.Popen(
                [OTELCOL, "--config", config], stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )
        self.addCleanup(deferToThread, process.wait)
        self.addCleanup(process.kill)
        return f"http://127.0.0.1:{port}/v1/traces"
