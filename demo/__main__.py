# SPDX-License-Identifier: Apache-2.0
"""`python -m demo`: run a pod VM and show what happens."""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.error import ReactorNotRunning
from twisted.python import log

from demo import timeline
from demo.daemon import TREE, Daemon
from demo.pod import WEB_PORT, Pod, processes_naming, remove_all
from demo.report import Report
from infranetes.guest.image import DEFAULT_DIR
from infranetes_common.concurrency import run_in_thread, start
from infranetes_common.reactors import IReactor, installed
from infranetes_common.wire import cri
from infranetes_common.wire.cri_rpcs import ImageStub, RuntimeStub
from tests.support import oci
from tests.support.keeping import keeping
from tests.support.registry import Registry
from txgrpc import Channel

DEFAULT_COMMAND = 'echo "Hello from $(hostname), a pod with $(nproc) CPU and the kernel $(uname -r)"'
BRIDGE = "infrademo0"  # not that of a daemon that serves a kubelet here
POD_CIDR = "10.87.0.0/24"
READY_SECONDS = 1800.0  # the first start makes the template
COMMAND_SECONDS = 60.0
GONE_SECONDS = 0.5  # for an answer that is not to come, and came at once before
PAGE = "Hello from the pod"
WEB = f"mkdir -p /tmp/www && echo '{PAGE}' >/tmp/www/index.html && exec httpd -f -p {WEB_PORT} -h /tmp/www"
_DIGEST = len("sha256:") + 16  # as much of an image's as people look at
INSIDE = "hostname; uname -sr; free -m | sed -n 2p; ip -4 -o addr show scope global | sed 's/ scope.*//'"


def configuration(options: argparse.Namespace, registry: Registry) -> str:
    """The daemon's TOML for this demo."""
    extra = Path(options.extra_config).read_text() if options.extra_config else ""
    return f"""\
socket = "{options.run_dir}/infranetes.sock"
state_dir = "{options.state}/node"
run_dir = "{options.run_dir}"
provider = "{options.provider}"

[images]
insecure_registries = ["{registry.host}"]

[control]
enter = {json.dumps(keeping())}

[providers.qemu]
bridge = "{BRIDGE}"
pod_cidr = "{POD_CIDR}"
image_dir = "{options.image_dir}"
{extra}"""


class Demo:
    """One run, from the registry to the pod's end.

    :ivar shown: what the JSON report has beside the steps.
    """

    def __init__(self, reactor: IReactor, options: argparse.Namespace, report: Report) -> None:
        self.reactor = reactor
        self.options = options
        self.report = report
        self.shown: dict[str, object] = {}
        self.interrupted = False
        self.registry = Registry()
        state = Path(options.state)
        state.mkdir(parents=True, exist_ok=True)
        self.daemon = Daemon(
            reactor,
            state / "infranetes.toml",
            Path(options.run_dir, "infranetes.sock"),
            state / "daemon.log",
        )
        self.pod: Pod | None = None
        self.channel: Channel | None = None

    async def run(self) -> None:
        """Take all steps, then clean up in any case."""
        try:
            await self.prepare()
            await self.live()
            await self.show_timeline()
            await self.end()
        except Exception:
            if keeping() and not self.interrupted:
                await self.wait_for_a_look()
            raise
        finally:
            await self.clean()

    async def wait_for_a_look(self) -> None:
        """Leave everything as it is until Ctrl-C."""
        ctl = f"{sys.executable} -m infranetes.ctl.cli --config {self.options.state}/infranetes.toml"
        self.report.say("\nA step failed. Daemon and VM are kept until Ctrl-C. To look at them:")
        self.report.say(f"     less {self.daemon.log}")
        self.report.say(f"     {ctl} pods    # describe, logs, console, enter POD")
        await Deferred()

    async def prepare(self) -> None:
        """Start registry and daemon, and remove what an earlier demo left."""
        state, report = Path(self.options.state), self.report
        with report.step("A registry on loopback, with a busybox image in it") as step:
            await run_in_thread(self.reactor, self.registry.start)
            self.daemon.config.write_text(configuration(self.options, self.registry))
            self.daemon.start()  # beside what follows
            built = await run_in_thread(self.reactor, oci.busybox)
            reference = await run_in_thread(self.reactor, self.registry.push, "busybox", "demo", built)
            step.facts.update(shown=reference)
        with report.step("The node daemon is ready") as step:
            self.channel = self.daemon.channel()
            runtime = RuntimeStub(self.channel)
            await self.daemon.ready(runtime, READY_SECONDS, report.progress)
            version = await runtime.Version(cri.VersionRequest(), timeout=5.0)
            step.facts.update(shown=f"{version.runtime_name} {version.runtime_version}")
        images = ImageStub(self.channel)
        self.pod = Pod(self.reactor, runtime, images, state / "logs")
        if left := await remove_all(runtime):
            report.say(f"     ended {left} that an earlier demo left")
        with report.step("PullImage") as step:
            pulled = await images.PullImage(
                cri.PullImageRequest(image=cri.ImageSpec(image=reference)), timeout=60.0
            )
            self.image = pulled.image_ref
            step.facts.update(shown=self.image[:_DIGEST], image=self.image)

    async def live(self) -> None:
        """Run the pod with two containers and look at it from the node."""
        pod, report = self.pod, self.report
        assert pod is not None
        with report.step("RunPodSandbox: a virtual machine is the pod") as step:
            await pod.run()
            step.facts.update(shown=pod.ip, id=pod.id)
            self.vm = await pod.vm()
            self.processes = processes_naming(self.vm)
            self.shown["pod"] = {"id": pod.id, "ip": pod.ip, "machine": self.vm}
        with report.step("CreateContainer and StartContainer: your command"):
            await pod.start("command", self.image, ["sh", "-c", self.options.command])
        with report.step("It runs to its end") as step:
            status = await pod.ended("command", COMMAND_SECONDS)
            ended = status.state == cri.CONTAINER_EXITED
            outcome = f"exit code {status.exit_code}" if ended else "still running, goes on"
            step.facts.update(shown=outcome)
        with report.step("Its log on the node") as step:
            lines = await pod.log("command", 10.0, complete=ended)
            step.facts.update(shown=f"{len(lines)} line{'s'[: len(lines) != 1]}")
        text = "".join(line.text + ("" if line.partial else "\n") for line in lines)
        report.say(f"     $ {self.options.command}")
        report.quote(text)
        self.shown["log"] = text
        self.shown["exit_code"] = status.exit_code if ended else None
        with report.step("A second container of the pod, a web server"):
            await pod.start("web", self.image, ["sh", "-c", WEB])
        with report.step("ExecSync in it"):
            answer = await pod.execute("web", ["sh", "-c", INSIDE])
        output = answer.stdout.decode(errors="replace")
        report.quote(output)
        self.shown["exec"] = output
        if self.options.provider == "simulated":
            report.say("     simulated VMs run no containers: their addresses do not answer")
            return
        with report.step(f"The node fetches http://{pod.ip}:{WEB_PORT}/") as step:
            await pod.fetch(PAGE, 15.0)
            self.shown["http"] = PAGE
            step.facts.update(shown=PAGE)

    async def show_timeline(self) -> None:
        """Show where the launch's time went, as `infranetes-ctl describe` has it."""
        assert self.pod is not None
        with self.report.step("infranetes-ctl describe default/demo, its timeline"):
            steps = await run_in_thread(self.reactor, timeline.told, self.daemon.config, self.pod.id)
        self.report.quote(timeline.drawn(steps))
        self.shown["timeline"] = [attrs.asdict(each) for each in steps]

    async def end(self) -> None:
        """Remove the pod and prove that its VM is gone."""
        pod, report = self.pod, self.report
        assert pod is not None
        with report.step("StopPodSandbox and RemovePodSandbox"):
            await pod.end()
        with report.step("The virtual machine is gone") as step:
            proofs = {
                "not listed": not await pod.known(),
                "no answer at its address": await pod.page(GONE_SECONDS) != PAGE,
                "no process of it": not processes_naming(self.vm),
            }
            step.facts.update(shown=", ".join(proofs), processes_before=self.processes)
            left = [name for name, held in proofs.items() if not held]
            if left:
                raise RuntimeError(f"the virtual machine is not gone: it fails {', '.join(left)}")

    async def clean(self) -> None:
        """End whatever is left, and say what can't be ended."""
        if self.channel is not None:
            try:
                if self.pod is not None and self.daemon.alive:
                    await self.pod.find_if_begun()
                    await remove_all(self.pod.runtime)
            except Exception as error:
                self.report.say(f"  !! a pod may be left, the next demo ends it: {error}")
            await self.channel.close()
        await self.daemon.end()
        await run_in_thread(self.reactor, self.registry.stop)
        await run_in_thread(self.reactor, remove_network)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="demo", description=__doc__)
    parser.add_argument("--command", default="", help="what the container runs, by sh")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout instead of lines")
    parser.add_argument("--provider", default="qemu", help="the PodProvider (qemu)")
    parser.add_argument("--state", default=str(TREE / "build" / "demo"), help="kept for the next demo")
    parser.add_argument("--run-dir", default="/run/infranetes-demo", help="of the daemon's socket")
    parser.add_argument("--image-dir", default=str(DEFAULT_DIR), help="of guest images (%(default)s)")
    parser.add_argument("--extra-config", default="", help="a TOML file added to the daemon's")
    options = parser.parse_args(arguments)
    options.command = options.command or DEFAULT_COMMAND
    return options


def remove_network() -> None:
    """Remove the bridge and its tables, unless a VM still uses it. Idempotent."""
    ports = Path(f"/sys/class/net/{BRIDGE}/brif")
    if not ports.is_dir() or any(ports.iterdir()):
        return
    for command in (
        ("ip", "link", "delete", "dev", BRIDGE),
        ("nft", "delete", "table", "ip", f"infranetes_{BRIDGE}"),
        ("nft", "delete", "table", "ip", f"infranetes_{BRIDGE}_shares"),
        ("nft", "delete", "table", "ip", f"infranetes_{BRIDGE}_fragments"),
        ("nft", "delete", "table", "bridge", f"infranetes_{BRIDGE}"),
    ):
        subprocess.run(command, check=False, capture_output=True)  # noqa: S603


async def run(demo: Demo) -> int:
    """Run the demo and report its outcome. Returns the exit code: 0, 1 if it failed, 130 if interrupted."""
    report = demo.report
    try:
        await demo.run()
    except Exception as error:
        if demo.interrupted:  # whatever error that became
            report.error = "interrupted"
            report.say("\nInterrupted; the VM is ended.")
            return 130
        report.error = str(error) or type(error).__name__
        report.say(f"\nThe demo failed: {report.error}")
        if str(demo.daemon.log) not in report.error:
            report.say(f"The daemon's log is {demo.daemon.log}")
        return 1
    report.say(f"\nAll of it took {sum(step.seconds for step in report.steps):.1f} s.")
    return 0


def main(arguments: Sequence[str]) -> int:
    """The program. Ctrl-C ends it once it has cleaned up."""
    reactor = installed()
    options = parse(arguments)
    report = Report(sys.stdout, quiet=options.json)
    demo = Demo(reactor, options, report)
    codes: list[int] = []

    def ended(code: int) -> None:
        codes.append(code)
        with contextlib.suppress(ReactorNotRunning):  # stopping already
            reactor.stop()

    def begin() -> None:
        done = start(run(demo)).addCallback(ended)
        done.addErrback(lambda failure: log.err(failure))

        def interrupt() -> Deferred[None]:
            demo.interrupted = True
            done.cancel()
            return done

        reactor.addSystemEventTrigger("before", "shutdown", interrupt)

    reactor.callWhenRunning(begin)
    reactor.run()
    if options.json:
        print(report.json(**demo.shown))
    return codes[0] if codes else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
