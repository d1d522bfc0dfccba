# SPDX-License-Identifier: Apache-2.0
"""Probes by commands, of pods with the annotation sleep-probes: the node repeats the last good answer."""

from __future__ import annotations

from collections.abc import Sequence

from twisted.internet.interfaces import IReactorTime

from infranetes.machines.sleeping import SleepGate
from infranetes.pods.node.handlers import Handler, Handlers
from infranetes.pods.node.hooks import PodFeature, Run
from infranetes.pods.node.inventory import Container, Sandbox
from infranetes.pods.sleeping.answers import Answers
from infranetes.providers.annotations import sleep_probes
from infranetes_common.wire import cri, vmserver

MOST_OUTPUT = 10 << 10  # bytes of an answer that is remembered: kubelet reads no more of a probe's


class CommandProbes(PodFeature):
    """Repeats the answers to commands while a pod sleeps.

    A command is taken for a probe once it has ended with 0 before. Then it keeps no pod awake."""

    name = "probes by commands"

    def __init__(self, clock: IReactorTime, handlers: Handlers, gate: SleepGate) -> None:
        self._clock = clock
        self._handlers = handlers
        self._gate = gate
        self._answers = Answers[vmserver.ExecSyncResponse]()

    def check(self, handler: Handler, config: cri.PodSandboxConfig) -> None:
        sleep_probes(handler.annotations.applied(config.annotations))

    async def execute(
        self, container: Container, command: Sequence[str], run: Run
    ) -> vmserver.ExecSyncResponse:
        sandbox = container.sandbox
        seconds = self.seconds(sandbox)
        if not seconds:
            return await run()
        question = (container.id, *command)
        now = self._clock.seconds()
        if sandbox.asleep is not None:
            answer = self._answers.get(sandbox.id, question, now - seconds)
            if answer is not None:
                return answer
        if not self._answers.has(sandbox.id, question):
            output = await run()
        else:
            with self._gate.probe(sandbox.id):
                output = await run()
        self._note(sandbox, question, output)
        return output

    def _note(self, sandbox: Sandbox, question: Sequence[str], output: vmserver.ExecSyncResponse) -> None:
        if output.exit_code == 0 and output.ByteSize() <= MOST_OUTPUT:
            self._answers.put(sandbox.id, question, output, self._clock.seconds())
        else:
            self._answers.remove(sandbox.id, question)

    def seconds(self, sandbox: Sandbox) -> float:
        """Return for how long a pod's answers are repeated; 0: they are not."""
        handler = self._handlers.of(sandbox.record)
        return sleep_probes(handler.vm_annotations(sandbox.config.annotations))

    def disconnected(self, sandbox: Sandbox) -> None:
        self._answers.forget(sandbox.id)
