# SPDX-License-Identifier: Apache-2.0
"""critest's benchmarks of the calls for pods and containers, compared with Debian's containerd."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from twisted.internet.utils import getProcessOutputAndValue

from bench.daemon import ROOT
from bench.figures import Missing, Report, say
from bench.setup import TEMPLATES, Setup
from infranetes_common.reactors import IReactor
from tests.interop.critest import CACHE
from tests.interop.critest_images import fetch

SAMPLES = 10
NEEDS = {
    str(ROOT / "build/tools/critest"): "make tools",
    "containerd": "apt-get install containerd",
    "runc": "apt-get install runc",
    "/usr/lib/cni/bridge": "apt-get install containernetworking-plugins",
    "iptables": "apt-get install iptables",
    "gcc": "apt-get install gcc libc6-dev",
    "docker-registry": "apt-get install docker-registry",
}


def prepare() -> None:
    """Fetch the packages of critest's images, which its own process, without a network, can't."""
    fetch(CACHE / "images")


async def run(reactor: IReactor, report: Report, samples: int = SAMPLES) -> None:
    say(f"  critest -benchmark, {samples} samples of each call and runtime")
    taken = await beside_containerd(reactor, report.setup, "--benchmark", str(samples))
    ours, theirs = taken["infranetes"], taken["containerd"]
    for name, seconds in ours.items():
        median, other = statistics.median(seconds), statistics.median(theirs[name])
        note = f"{len(seconds)} samples, one after the other"
        for whose, value in (("", median), ("containerd", other)):
            report.add("conformance", name, value * 1000, "ms", note=note, whose=whose, percent=50)
        report.add("conformance", f"{name} beside containerd", median / other, "x")


async def beside_containerd(reactor: IReactor, setup: Setup, *flags: str) -> Any:  # Any: JSON
    """Run `tests.interop.critest` with these flags over Infranetes and containerd. Return its JSON.

    :raise Missing: a program is not installed.
    """
    for program, how in NEEDS.items():
        if shutil.which(program) is None:
            raise Missing(f"{program} is missing: {how}")
    with tempfile.TemporaryDirectory() as directory:
        figures = Path(directory, "figures.json")
        command = [sys.executable, "-m", "tests.interop.critest", *flags]
        command += ["--beside", "containerd", "--json", str(figures), "--template-dir", str(TEMPLATES)]
        command += ["--accelerator", setup.accelerator]
        command += ["--image-dir", str(setup.image_dir)] if setup.image_dir else []
        out, err, code = await getProcessOutputAndValue(
            command[0], command[1:], env=os.environ, path=str(ROOT), reactor=reactor
        )
        if code:
            raise RuntimeError(f"critest {flags[0]}: {(out + err).decode(errors='replace')[-1500:]}")
        return json.loads(figures.read_text())
