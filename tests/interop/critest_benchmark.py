# SPDX-License-Identifier: Apache-2.0
"""critest's own benchmarks of pods and containers: how long each call takes, runtime by runtime."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from tests.interop.critest_runtimes import Runtime
from tests.interop.critest_specs import CRITEST

SECONDS = 3600.0
_RESULT_SECONDS = 600  # critest panics when no sample comes for so long
_FILES = ("pod_benchmark_data.json", "container_benchmark_data.json")
_OTHER = "Image|from scratch"  # benchmarks that have other things in them


class NoFigures(Exception):
    """Something could not be measured; the message has the end of what was said."""


def measure(runtime: Runtime, directory: Path, samples: int) -> dict[str, list[float]]:
    """Seconds of each call, by critest's name of it, in the order of the samples, which are taken one by one.

    :raise NoFigures: a call failed, or critest."""
    directory.mkdir(parents=True)
    numbers = {
        "podsNumber": samples,
        "podsNumberParallel": 1,
        "podBenchmarkTimeoutSeconds": _RESULT_SECONDS,
        "containersNumber": samples,
        "containersNumberParallel": 1,
        "containerBenchmarkTimeoutSeconds": _RESULT_SECONDS,
    }
    parameters = directory / "parameters.yaml"
    parameters.write_text(json.dumps(numbers))  # JSON is YAML
    command = [
        str(CRITEST),
        "--config",
        os.devnull,
        "-benchmark",
        "--ginkgo.skip",
        _OTHER,
        "--ginkgo.no-color",
    ]
    command += ["--runtime-endpoint", runtime.endpoint, "--image-endpoint", runtime.endpoint]
    command += ["-benchmarking-params-file", str(parameters), "-benchmarking-output-dir", str(directory)]
    done = subprocess.run(
        command,
        cwd=directory,
        env={**os.environ, "TMPDIR": str(directory)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=SECONDS,
    )
    found: dict[str, list[float]] = {}
    if done.returncode == 0:
        for name in _FILES:
            found.update(seconds(json.loads((directory / name).read_text())))
    if not found:
        raise NoFigures(f"critest measured nothing of {runtime.name}: {(done.stdout + done.stderr)[-2000:]}")
    return found


def seconds(results: Any) -> dict[str, list[float]]:
    """One of critest's files: seconds by the name of the call."""
    points = sorted(results["datapoints"], key=lambda point: point["sampleIndex"])
    return {
        name: [point["operationsDurationsNs"][index] / 1e9 for point in points]
        for index, name in enumerate(results["operationsNames"])
    }
