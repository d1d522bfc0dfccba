# SPDX-License-Identifier: Apache-2.0
"""`infranetes-ctl sizes`: what the daemon answers, and how it is shown."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr
from typing import Any

from zope.interface import alsoProvides

from infranetes.control.sizes import SizeCalls
from infranetes.ctl import calls as asking
from infranetes.ctl import cli
from infranetes.ctl.render import as_json, as_text
from infranetes.providers.interface import Size
from infranetes.providers.size_choices import IChoosesSizes, SizeChoice, SizeOnOffer
from infranetes_common.concurrency import start
from infranetes_common.errors import FailedPrecondition, NotFound
from infranetes_common.wire import control
from tests.infranetes.pods.case import PodsTestCase
from tests.infranetes.pods.fakes import FakeNode

GIB = 1 << 30
CHOICE = SizeChoice(
    needed=Size(2000, 8 * GIB + (GIB >> 2)),
    architecture="x86_64",
    guest_memory=GIB >> 2,
    min_memory=GIB,
    fitting=(
        SizeOnOffer("m5.xlarge", 4000, 0, 16 * GIB, 0, "x86_64", 0.214, "AWS' price list"),
        SizeOnOffer("x.new", 4000, 0, 16 * GIB, 0, "x86_64", None, ""),
    ),
    fitting_count=7,
    cheaper=(
        SizeOnOffer(
            "t3.large", 600, 2, 8 * GIB, 0, "x86_64", 0.0912, "prices_file", "0.6 CPUs: the baseline of its 2"
        ),
    ),
    cheaper_count=31,
    offers_from="EC2",
    offers_at=1e9,
    prices_from="libcloud 3.9.1",
)


class SizesTests(PodsTestCase):
    def setUp(self) -> None:
        self.world = FakeNode()
        self.world.provider_ready()
        self.addCleanup(self.world.kill)
        self.calls = SizeCalls(self.world.node.providers)
        self.asked: list[tuple[Size, int, int]] = []

    def choose(self) -> None:
        """Give the provider's VMs sizes."""

        def choose_size(size: Size, gpus: int, limit: int) -> SizeChoice:
            self.asked.append((size, gpus, limit))
            return CHOICE

        provider: Any = self.world.provider
        provider.choose_size = choose_size
        alsoProvides(provider, IChoosesSizes)

    def answer(self, *words: str) -> tuple[Any, Any]:
        """Return the options of a command line, and the daemon's answer to it."""
        options = cli.parser().parse_args(["sizes", *words])
        request: list[control.ChooseSizeRequest] = []
        calls, do = self.calls, self.do

        class Stub:
            async def ChooseSize(self, sent: control.ChooseSizeRequest, timeout: float) -> Any:
                request.append(sent)
                return await calls.ChooseSize(sent, None)  # type: ignore[arg-type]

        stub: Any = Stub()
        answer, self.code = do(asking.sizes(stub, options))
        return options, answer

    def test_what_is_asked_for_reaches_the_provider(self) -> None:
        self.choose()
        self.answer("--cpu", "2", "--memory", "8Gi", "--gpus", "1", "--overhead", "384Mi", "--limit", "3")
        self.answer("--cpu", "500m")
        self.assertEqual(self.asked, [(Size(2000, 8 * GIB, 384 << 20), 1, 3), (Size(500), 0, 5)])
        self.assertEqual(self.code, cli.DONE)

    def test_text(self) -> None:
        self.choose()
        options, answer = self.answer("--cpu", "2", "--memory", "8Gi")
        text = as_text("sizes", answer, options)
        for line in (
            "asked: 2 CPU, 8 GiB",
            "needed: 2 CPU, 8.25 GiB (256 MiB of them the guest's own), x86_64",
            "prices: of libcloud 3.9.1",
            "m5.xlarge   4     16 GiB   -      0.2140   AWS' price list",
            "7 fit",
            "t3.large   0.6 of 2   8 GiB    -      0.0912   prices_file   0.6 CPUs: the baseline of its 2",
            "and 30 more that cost no more and do not fit",
        ):
            self.assertIn(line, text.splitlines())
        self.assertIn("sizes: of EC2, ", text)
        small = as_text("sizes", answer, cli.parser().parse_args(["sizes"]))
        self.assertIn("no VM has less than 1 GiB", small)

    def test_json(self) -> None:
        self.choose()
        options, answer = self.answer("--cpu", "2", "--memory", "8Gi")
        document = json.loads(json.dumps(as_json("sizes", answer, options)))
        self.assertEqual(document["asked"], {"cpu_millis": 2000, "memory_bytes": 8 * GIB, "gpus": 0})
        self.assertEqual(document["needed"]["memory_bytes"], 8 * GIB + (GIB >> 2))
        self.assertEqual(document["fitting"][0]["price_per_hour"], 0.214)
        self.assertIsNone(document["fitting"][1]["price_per_hour"])
        self.assertEqual(document["sizes"], {"from": "EC2", "at": 1e9})
        self.assertEqual(document["prices"], {"from": "libcloud 3.9.1", "at": None})

    def test_a_node_whose_vms_have_any_size(self) -> None:
        self.failed(FailedPrecondition)
        self.choose()
        self.failed(NotFound, "--provider", "elsewhere")

    def failed(self, error: type[Exception], *words: str) -> None:
        provider = words[1] if words else ""
        request = control.ChooseSizeRequest(provider=provider)
        calls: Any = self.calls
        self.failureResultOf(start(calls.ChooseSize(request, None)), error)

    def test_words_that_are_no_sizes(self) -> None:
        for words in (["--cpu", "many"], ["--memory", "-1"], ["--gpus", "1.5"], ["--memory", "8 Gi"]):
            with redirect_stderr(io.StringIO()) as said:
                self.assertRaises(SystemExit, cli.parser().parse_args, ["sizes", *words])
            self.assertIn(words[0], said.getvalue())
