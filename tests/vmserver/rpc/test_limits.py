# SPDX-License-Identifier: Apache-2.0
"""The node's limits allow everything that an honest agent may send."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from infranetes.machines.agent import checks, limits
from infranetes.machines.agent.screen import AgentScreen
from infranetes.pods.containers.containers import MAX_EXEC_OUTPUT
from infranetes_common.filesync.manifest import DIRECTORY, FILE, MAX_PATH, SYMLINK, Entry
from infranetes_common.filesync.scan import CHUNK_BYTES
from infranetes_common.filesync.wire import pages, to_wire
from infranetes_common.machine_usage import MAX_CARDS
from infranetes_common.wire import cri
from infranetes_common.wire import vmserver as messages
from txgrpc.service import Method
from vmserver import validate
from vmserver.containers.log_lines import TEXT_BYTES
from vmserver.rpc import bounds, sessions
from vmserver.rpc.layers import MAX_SIZE

MOST = 2**63 - 1
METHODS = {one.name: Method.from_descriptor(one) for one in messages.Agent.methods}


def _full(descriptor: Any) -> dict[str, Any]:
    return {one.name: MOST for one in descriptor.fields if one.message_type is None and one.name != "device"}


class LimitTests(SynchronousTestCase):
    """Message by message."""

    def taken(self, method: str, *said: Any) -> None:
        screen = AgentScreen()
        for message in said:
            payload = message.SerializeToString()
            self.assertLessEqual(len(payload), screen.max_response(METHODS[method]), method)
            screen.check(METHODS[method], payload)

    def usage(self) -> Any:
        data = cri.PsiData(Total=MOST, Avg10=99.5, Avg60=1.5, Avg300=0.5)
        psi = cri.PsiStats(Full=data, Some=data)
        return messages.Usage(
            time_nanos=limits.LATEST,
            cpu=messages.Cpu(total_nanos=MOST, nano_cores=cri.UInt64Value(value=MOST)),
            memory=messages.Memory(**_full(messages.Memory.DESCRIPTOR)),
            processes=MOST,
            disks=[messages.Disk(device=f"disk{n}", **_full(messages.Disk.DESCRIPTOR)) for n in range(20)],
            cpu_pressure=psi,
            memory_pressure=psi,
            io_pressure=psi,
        )

    def test_figures_of_a_hundred_containers(self) -> None:
        written = messages.Written(bytes=MOST)
        container: dict[str, Any] = {"usage": self.usage(), "written": written, "started_at": limits.LATEST}
        answer = messages.StatsResponse(
            machine=self.usage(),
            cards=[messages.NetworkCard(name=f"card{n}", received_bytes=MOST) for n in range(MAX_CARDS)],
            containers=[messages.ContainerUsage(id=f"{n:032x}", **container) for n in range(100)],
        )
        self.taken("Stats", answer)
        before = answer.SerializeToString()
        self.assertEqual(checks.clamped(answer).SerializeToString(), before)

    def test_lists_of_a_volume_of_a_hundred_thousand_files(self) -> None:
        for long in (b"", b"d" * 250 + b"/" + b"e" * 250):
            self.listed(Entry(b"%06d" % n + long, FILE, 0o644, 1, 1, MOST, MOST) for n in range(100_000))

    def test_lists_of_the_longest_paths(self) -> None:
        path = b"/".join([b"d" * 200] * 20)
        links = (Entry(path + b"%d" % n, SYMLINK, 0o777, 1, 1, target=b"t" * 4000) for n in range(1000))
        self.listed([Entry(b"", DIRECTORY, 0o755, 0, 0), *links])

    def listed(self, entries: Iterable[Entry]) -> None:
        for page in pages(entries):
            self.taken("ListVolume", messages.ListVolumeResponse(entries=map(to_wire, page)))

    def test_pieces(self) -> None:
        entry = Entry(b"p" * MAX_PATH, SYMLINK, 0o777, 2**32 - 2, 2**32 - 2, target=b"t" * MAX_PATH)
        self.taken(
            "ReadVolume",
            messages.VolumeChange(data=bytes(CHUNK_BYTES)),
            messages.VolumeChange(entry=to_wire(entry)),
            messages.VolumeChange(unread=b"p" * MAX_PATH),
        )
        self.assertLessEqual(CHUNK_BYTES, limits.CHUNK_BYTES)
        output = bytes(sessions.MAX_CHUNK_BYTES)
        for method in ("Exec", "Attach", "Shell"):
            self.taken(method, messages.SessionOutput(stdout=output), messages.SessionOutput(stderr=output))
        self.taken("PortForward", messages.PortForwardOutput(data=output))
        self.taken("WatchVolumes", messages.WatchVolumesResponse(id="v" * 64))

    def test_a_commands_output(self) -> None:
        output = bytes(MAX_EXEC_OUTPUT)
        self.taken("ExecSync", messages.ExecSyncResponse(stdout=output, stderr=output, exit_code=-1))

    def test_log_records_are_cut_to_what_is_taken(self) -> None:
        cursor = "c" * validate.MAX_CURSOR
        said = messages.LogRecord(line=b"x" * 1_000_000, cursor=cursor, time_nanos=MOST, gap=True)
        made = bounds.record(said)
        self.taken("ReadLog", made, messages.LogRecord(text=b"x" * TEXT_BYTES, cursor=cursor, gap=True))
        self.assertEqual((len(made.line), len(checks.CheckedRecords("c").checked(made).line)), (16384, 16384))

    def test_states_are_cut_to_what_is_taken(self) -> None:
        user = cri.ContainerUser(linux=cri.LinuxContainerUser(supplemental_groups=range(60_000)))
        said = messages.ContainerState(id="c" * 64, message="é" * 1_000_000, reason="r" * 5000, user=user)
        made = bounds.state(said)
        self.taken("Watch", messages.WatchEvent(container=made))
        for method in ("CreateContainer", "StartContainer", "StopContainer", "UpdateContainer"):
            self.taken(method, METHODS[method].response_class(state=made))
        before = made.SerializeToString()
        self.assertEqual(checks.checked_state("c" * 64, made).SerializeToString(), before)
        self.assertEqual(len(said.message), 1_000_000)
        short = messages.ContainerState(message="m")
        self.assertIs(bounds.state(short), short)

    def test_layers(self) -> None:
        digests = [f"sha256:{n:064x}" for n in range(validate.MAX_LAYERS)]
        layers = [
            messages.LayerState(diff_id=one, mounted=True, arrived=MAX_SIZE, digest=one) for one in digests
        ]
        self.taken("ListLayers", messages.ListLayersResponse(layers=layers))

    def test_images(self) -> None:
        images = [f"sha256:{n:064x}" for n in range(4096)]
        self.taken("ListImages", messages.ListImagesResponse(image_ids=images))
