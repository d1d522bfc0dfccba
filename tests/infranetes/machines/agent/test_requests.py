# SPDX-License-Identifier: Apache-2.0
"""What each call asks the agent, how long it waits, and what it makes of the answer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from ipaddress import ip_network
from typing import Any, cast

from google.protobuf.message import Message
from twisted.internet.defer import Deferred, succeed
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from infranetes.machines import interface
from infranetes.machines.agent import client, disks, firewall, keeping, layers, limits, nfs, size, volumes
from infranetes.machines.agent.calls import CHUNK_BYTES, closing
from infranetes.machines.agent.client import AgentClient
from infranetes.machines.keeping import Adoption, Hook
from infranetes.providers.interface import MemoryRange
from infranetes_common.concurrency import start
from infranetes_common.errors import (
    InfranetesError,
    InvalidArgument,
    NotOffered,
    ResourceExhausted,
    Unavailable,
)
from infranetes_common.filesync.manifest import FILE, Bounds, Entry, Removed, Unread
from infranetes_common.filesync.wire import change_to_wire, to_wire
from infranetes_common.nfs import NfsMount
from infranetes_common.pod_firewall import Allowed, PodFirewall, Ports
from infranetes_common.wire import cri, vmserver
from infranetes_common.wire.vmserver_rpcs import AgentStub
from txgrpc import Channel, Code, GrpcError
from txgrpc.service import Method
from txgrpc.turns import Turns

METHODS = {each.name: Method.from_descriptor(each) for each in vmserver.Agent.methods}
BOUNDS = Bounds(entries=3, bytes=1000)


class FakeCall:
    """A streaming call: what it is to yield, and then whether it fails.

    :ivar sent: what was sent. :ivar ahead: how many bytes may be received ahead."""

    def __init__(self, messages: list[Message], error: GrpcError | None = None) -> None:
        self.messages = messages
        self.error = error
        self.sent: list[Message] = []
        self.ahead = 0
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True

    def receive_ahead(self, size: int) -> None:
        self.ahead = size

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    async def __aiter__(self) -> AsyncIterator[Message]:
        for message in self.messages:
            yield message
        if self.error is not None:
            raise self.error


class FakeChannel:
    """A channel that notes each call.

    :ivar calls: of each call the RPC, the request (a list of a stream's) and the time limit.
    :ivar answers: the answer to an RPC, if it is not an empty message: a message, or a FakeCall."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any, float | None]] = []
        self.answers: dict[str, Any] = {}
        self.turns = Turns(Clock())

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = METHODS[name]

        def call(request: Any = None, *, timeout: float | None) -> Any:
            answer = self.answers.get(name, method.response_class())
            if method.client_streaming and not method.server_streaming:
                return start(self._upload(name, request, timeout, answer))
            self.calls.append((name, request, timeout))
            return answer if method.server_streaming else succeed(answer)

        return call

    async def _upload(self, name: str, requests: Any, timeout: float | None, answer: Message) -> Message:
        self.calls.append((name, [each async for each in requests], timeout))
        return answer


async def iterated(*values: Any) -> AsyncIterator[Any]:
    for each in values:
        yield each


async def collected(values: Any) -> list[Any]:
    return [each async for each in values]


class NotedClient(AgentClient):
    """A client whose calls the channel itself notes."""

    def __init__(self, channel: FakeChannel) -> None:
        super().__init__("s1", cast(Channel, channel))
        self._stub = cast(AgentStub, channel)


class RequestCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.channel = FakeChannel()
        self.client = NotedClient(self.channel)

    def asked(self, call: Any, rpc: str, request: Any, seconds: float | None) -> Any:
        """Check that a call asks for this, and return what it makes of the answer."""
        self.channel.calls.clear()
        result: Any = self.successResultOf(start(call))
        self.assertEqual(self.channel.calls, [(rpc, request, seconds)])
        return result


class UnaryTests(RequestCase):
    """Calls with one request and one answer."""

    def test_the_machine(self) -> None:
        one = self.client
        for seconds in (interface.CALL_SECONDS, 3.0):
            self.asked(one.info(seconds), "Info", vmserver.InfoRequest(), seconds)
            self.asked(one.new_key(seconds), "NewKey", vmserver.NewKeyRequest(), seconds)
            self.asked(one.rekey("pem", seconds), "Rekey", vmserver.RekeyRequest(certificate="pem"), seconds)
            self.asked(one.stats(seconds), "Stats", vmserver.StatsRequest(), seconds)
        config, dns = cri.PodSandboxConfig(hostname="web"), cri.DNSConfig(servers=["192.0.2.1"])
        for provider, seconds in (("", interface.CALL_SECONDS), ("oci", client.ENGINE_SECONDS)):
            configured = vmserver.ConfigureSandboxRequest(
                config=config, node_dns=dns, container_provider=provider
            )
            call = one.configure(config, dns, provider)
            self.asked(call, "ConfigureSandbox", configured, seconds)
        self.asked(one.warm_up(), "WarmUp", vmserver.WarmUpRequest(), client.ENGINE_SECONDS)
        corrected = vmserver.CorrectClockRequest(steady_nanos=1, earliest_nanos=2, latest_nanos=3)
        self.asked(one.correct_clock(1, 2, 3), "CorrectClock", corrected, 30.0)

    def test_its_size(self) -> None:
        ranges = [MemoryRange(4096, 8192), MemoryRange(1 << 30, 1)]
        said = [vmserver.MemoryRange(address=one.address, size=one.size) for one in ranges]
        released = vmserver.ReleaseMemoryRequest(ranges=said, seconds=7)
        self.asked(self.client.release_memory(ranges, 7), "ReleaseMemory", released, 7 + size._MARGIN_SECONDS)
        restored = vmserver.RestoreMemoryRequest(ranges=said)
        self.asked(self.client.restore_memory(ranges), "RestoreMemory", restored, size._RESTORE_SECONDS)
        used = vmserver.UseProcessorsRequest(count=3)
        self.asked(self.client.use_processors(3), "UseProcessors", used, size._RESTORE_SECONDS)

    def test_its_containers_are_held_and_go_on(self) -> None:
        one = self.client
        hooks = {"c1": Hook(("sync",), seconds=5.0), "c2": Hook(signal=12, seconds=0.5)}
        said = vmserver.HoldRequest(volumes=["a", "b"], keep_secrets=True, seconds=20.0)
        said.hooks["c1"].CopyFrom(vmserver.Hook(command=["sync"], seconds=5.0))
        said.hooks["c2"].CopyFrom(vmserver.Hook(signal=12, seconds=0.5))
        self.channel.answers["Hold"] = vmserver.HoldResponse(containers=["c1", "c2"])
        call = one.hold(hooks, {"b", "a"}, keep_secrets=True, seconds=20.0)
        held = self.asked(call, "Hold", said, 20.0 + keeping._MARGIN_SECONDS)
        self.assertEqual(held, ["c1", "c2"])
        self.asked(one.release(), "Release", vmserver.ReleaseRequest(), keeping.RELEASE_SECONDS)

    def test_what_brought_secrets_is_overwritten_once_they_are_gone(self) -> None:
        self.successResultOf(start(self.client.hold({}, {"v1"}, seconds=20.0)))
        self.assertEqual([name for name, *_ in self.channel.calls], ["Hold", "PutVolume", "RemoveVolume"])
        _, (header, entry, *data), _ = self.channel.calls[1]
        sent = b"".join(each.change.data for each in data)
        self.assertEqual(sent, bytes(entry.change.entry.size))
        self.assertGreaterEqual(len(sent), 2 * 128 * 4096)
        self.assertEqual(header.header.id, self.channel.calls[2][1].id)
        self.channel.calls.clear()
        self.successResultOf(start(self.client.hold({}, [], seconds=20.0)))
        self.assertEqual([name for name, *_ in self.channel.calls], ["Hold"])

    def test_who_holds_a_container_that_cant_be_or_one_twice_is_not_believed(self) -> None:
        for ids in (["c1", "c1"], ["../c1"], [""]):
            self.channel.answers["Hold"] = vmserver.HoldResponse(containers=ids)
            self.failureResultOf(start(self.client.hold({}, [], seconds=1.0)), InvalidArgument)

    def test_a_hook_is_a_command_or_a_signal(self) -> None:
        for wrong in (
            {},
            {"command": ("a",), "signal": 1},
            {"signal": 65},
            {"signal": -1},
            {"signal": 1, "seconds": 0.0},
            {"signal": 1, "seconds": 601.0},
            {"signal": 1, "seconds": float("nan")},
        ):
            self.assertRaises(ValueError, Hook, **cast(Any, wrong))

    def test_kept_containers_are_adopted(self) -> None:
        config, sandbox = cri.ContainerConfig(working_dir="/"), cri.PodSandboxConfig(hostname="web")
        hook = Hook(("reseed",), seconds=3.0)
        adoptions = [Adoption("old1", "new1", config, hook), Adoption("old2", "new2", config)]
        volumes = {"v2": "w2", "v1": "w1"}
        said = vmserver.AdoptRequest(
            containers=[
                vmserver.Adoption(
                    old_id="old1",
                    new_id="new1",
                    config=config,
                    hook=vmserver.Hook(command=["reseed"], seconds=3.0),
                ),
                vmserver.Adoption(old_id="old2", new_id="new2", config=config),
            ],
            volumes=[
                vmserver.AdoptedVolume(old_id="v1", new_id="w1"),
                vmserver.AdoptedVolume(old_id="v2", new_id="w2"),
            ],
            sandbox_config=sandbox,
        )
        states = [vmserver.ContainerState(id=id, state=cri.CONTAINER_CREATED) for id in ("new1", "new2")]
        self.channel.answers["Adopt"] = vmserver.AdoptResponse(containers=states)
        call = self.client.adopt(adoptions, volumes, sandbox)
        self.assertEqual(self.asked(call, "Adopt", said, keeping.ADOPT_SECONDS), states)

    def test_who_adopts_others_too_few_or_in_no_state_is_not_believed(self) -> None:
        adoption = Adoption("old", "new", cri.ContainerConfig())
        for states in (
            [],
            [vmserver.ContainerState(id="old")],
            [vmserver.ContainerState(id="new", state=cri.CONTAINER_UNKNOWN)],
            [vmserver.ContainerState(id="new")] * 2,
        ):
            self.channel.answers["Adopt"] = vmserver.AdoptResponse(containers=states)
            call = self.client.adopt([adoption], {}, cri.PodSandboxConfig())
            self.failureResultOf(start(call), InvalidArgument)

    def test_the_pods_network_takes_packets_no_longer_than_the_node_said(self) -> None:
        request = vmserver.JoinPodNetworkRequest(mtu=1400)
        for answered, mtu in ((1300, 1300), (9000, 1400)):
            self.channel.answers["JoinPodNetwork"] = vmserver.JoinPodNetworkResponse(mtu=answered)
            call = self.client.join_pod_network(request)
            self.assertEqual(self.asked(call, "JoinPodNetwork", request, client.ENGINE_SECONDS), mtu)

    def test_containers(self) -> None:
        one, state = self.client, vmserver.ContainerState(id="c1", exit_code=3)
        config, sandbox = cri.ContainerConfig(working_dir="/"), cri.PodSandboxConfig(hostname="web")
        limited = cri.LinuxContainerResources(cpu_quota=5)
        for call, rpc, request, seconds in (
            (
                one.create("c1", "sha256:1", config, sandbox),
                "CreateContainer",
                vmserver.CreateContainerRequest(
                    id="c1", image_id="sha256:1", config=config, sandbox_config=sandbox
                ),
                120.0,
            ),
            (one.start("c1"), "StartContainer", vmserver.StartContainerRequest(id="c1"), 120.0),
            (
                one.stop("c1", 8),
                "StopContainer",
                vmserver.StopContainerRequest(id="c1", grace_seconds=8),
                8 + interface.CALL_SECONDS,
            ),
            (
                one.stop("c1", 8, within=2.0),
                "StopContainer",
                vmserver.StopContainerRequest(id="c1", grace_seconds=8),
                10.0,
            ),
            (
                one.update("c1", limited),
                "UpdateContainer",
                vmserver.UpdateContainerRequest(id="c1", resources=limited),
                interface.CALL_SECONDS,
            ),
        ):
            self.channel.answers[rpc] = METHODS[rpc].response_class(state=state)
            self.assertEqual(self.asked(call, rpc, request, seconds), state)
        for seconds in (interface.CALL_SECONDS, 2.0):
            removed = vmserver.RemoveContainerRequest(id="c1")
            self.asked(one.remove("c1", seconds), "RemoveContainer", removed, seconds)

    def test_a_command_is_waited_for_as_long_as_it_may_take(self) -> None:
        for seconds, limit, waits in ((5, 60.0, 5 + client.EXEC_MARGIN_SECONDS), (0, 60.0, 60.0)):
            request = vmserver.ExecSyncRequest(
                id="c1", command=["ls", "-l"], timeout_seconds=seconds, max_output_bytes=9
            )
            call = self.client.exec_sync("c1", ["ls", "-l"], seconds, limit, 9)
            self.asked(call, "ExecSync", request, waits)

    def test_images(self) -> None:
        one = self.client
        self.channel.answers["ListImages"] = vmserver.ListImagesResponse(image_ids=["b", "a", "b"])
        listed = vmserver.ListImagesRequest()
        self.assertEqual(self.asked(one.images(), "ListImages", listed, interface.CALL_SECONDS), {"a", "b"})
        self.channel.answers["MissingLayers"] = vmserver.MissingLayersResponse(present=1)
        missing = vmserver.MissingLayersRequest(diff_ids=["a", "b"])
        call = one.missing_layers(["a", "b"])
        self.assertEqual(self.asked(call, "MissingLayers", missing, interface.CALL_SECONDS), 1)
        fetched = vmserver.FetchImageRequest(image_id="i", url="https://localhost/")
        self.asked(one.fetch_image("i", "https://localhost/"), "FetchImage", fetched, client.LOAD_SECONDS)
        removed = vmserver.RemoveImageRequest(image_id="i")
        self.asked(one.remove_image("i"), "RemoveImage", removed, interface.CALL_SECONDS)

    def test_layers(self) -> None:
        one, shown = self.client, [vmserver.LayerDisk(diff_id="a", target=1, lun=2)]
        mounted = vmserver.MountLayersRequest(disks=shown)
        self.asked(one.mount_layers(shown), "MountLayers", mounted, layers.MOUNT_SECONDS)
        removed = vmserver.RemoveLayersRequest(diff_ids=["a"], unneeded=True)
        self.asked(one.remove_layers(["a"]), "RemoveLayers", removed, layers.MOUNT_SECONDS)
        added = vmserver.AddImageRequest(image_id="i", configuration=b"{}", disks=shown)
        self.asked(one.add_image("i", b"{}", shown), "AddImage", added, layers.ADD_SECONDS)
        listed = vmserver.ListLayersRequest(diff_ids=["a"])
        states = [vmserver.LayerState(diff_id="a", arrived=5, digest="sha256:" + "1" * 64)]
        self.channel.answers["ListLayers"] = vmserver.ListLayersResponse(layers=states)
        self.assertEqual(self.asked(one.layers(["a"]), "ListLayers", listed, layers.LIST_SECONDS), states)

    def test_disks(self) -> None:
        one = self.client
        mounted = vmserver.MountDiskRequest(
            serial="d1", filesystem="ext4", options=["noatime"], read_only=True, group=7
        )
        call = one.mount_disk("d1", "ext4", ["noatime"], read_only=True, group=7)
        self.asked(call, "MountDisk", mounted, disks.MOUNT_SECONDS)
        plain = vmserver.MountDiskRequest(serial="d1", filesystem="ext4")
        self.asked(one.mount_disk("d1", "ext4"), "MountDisk", plain, disks.MOUNT_SECONDS)
        self.assertFalse(plain.HasField("group"), "it would change the group of all files to root")
        found = vmserver.FindDiskRequest(serial="d1")
        self.channel.answers["FindDisk"] = vmserver.FindDiskResponse(device="/dev/sdb")
        self.assertEqual(self.asked(one.find_disk("d1"), "FindDisk", found, disks.FIND_SECONDS), "/dev/sdb")
        for device in ("", "/dev/../etc/passwd", "sdb"):
            self.channel.answers["FindDisk"] = vmserver.FindDiskResponse(device=device)
            self.failureResultOf(start(one.find_disk("d1")), Unavailable)
        synced = vmserver.SyncDiskRequest(serial="d1")
        self.asked(one.sync_disk("d1"), "SyncDisk", synced, disks.SYNC_SECONDS)
        unmounted = vmserver.UnmountDiskRequest(serial="d1")
        for seconds in (interface.UNMOUNT_SECONDS, 3.0):
            self.asked(one.unmount_disk("d1", seconds), "UnmountDisk", unmounted, seconds)
        self.asked(one.unmount_disk("d1"), "UnmountDisk", unmounted, interface.UNMOUNT_SECONDS)
        for grow, seconds in ((False, disks.USAGE_SECONDS), (True, disks.MOUNT_SECONDS)):
            measured = vmserver.DiskUsageRequest(serial="d1", grow=grow)
            self.asked(one.disk_usage("d1", grow=grow), "DiskUsage", measured, seconds)
        self.asked(one.disk_usage("d1"), "DiskUsage", vmserver.DiskUsageRequest(serial="d1"), 20.0)

    def test_nfs(self) -> None:
        mount = NfsMount("192.0.2.1:/export", ("addr=192.0.2.1", "vers=4.2"))
        request = vmserver.MountNfsRequest(
            container_id="c1", source="192.0.2.1:/export", options=["addr=192.0.2.1", "vers=4.2"]
        )
        self.channel.answers["MountNfs"] = vmserver.MountNfsResponse(id="nfs-1")
        call = self.client.mount_nfs("c1", mount)
        self.assertEqual(self.asked(call, "MountNfs", request, nfs.MOUNT_SECONDS), "nfs-1")
        self.channel.answers["MountNfs"] = vmserver.MountNfsResponse(id="../x")
        self.failureResultOf(start(self.client.mount_nfs("c1", mount)), InfranetesError)
        unmounted = vmserver.UnmountNfsRequest(seconds=9)
        self.asked(self.client.unmount_nfs(9), "UnmountNfs", unmounted, 9 + nfs._MARGIN_SECONDS)

    def test_a_firewall_says_which_way_is_open_and_which_closed(self) -> None:
        networks = (ip_network("10.0.0.0/8"), ip_network("2001:db8::/32"))
        ports = (Ports("TCP", 80, 80), Ports("UDP", 53, 60), Ports("SCTP", 1, 9))
        allowed = (Allowed(networks, ports), Allowed(networks[:1]), Allowed(networks[:1], ()))
        way = vmserver.FirewallWay(
            rules=[
                vmserver.FirewallRule(
                    networks=["10.0.0.0/8", "2001:db8::/32"],
                    ports=[
                        vmserver.FirewallPorts(protocol=6, first=80, last=80),
                        vmserver.FirewallPorts(protocol=17, first=53, last=60),
                        vmserver.FirewallPorts(protocol=132, first=1, last=9),
                    ],
                ),
                vmserver.FirewallRule(networks=["10.0.0.0/8"], all_ports=True),
                vmserver.FirewallRule(networks=["10.0.0.0/8"]),
            ]
        )
        closed = vmserver.FirewallWay()
        for pod, request in (
            (PodFirewall(allowed, ()), vmserver.SetFirewallRequest(ingress=way, egress=closed)),
            (PodFirewall((), allowed), vmserver.SetFirewallRequest(ingress=closed, egress=way)),
            (PodFirewall(), vmserver.SetFirewallRequest()),
        ):
            self.asked(self.client.set_firewall(pod), "SetFirewall", request, firewall.SECONDS)
        request = vmserver.SetFirewallRequest(tunnel_port=4789)
        self.asked(self.client.set_firewall(PodFirewall(), 4789), "SetFirewall", request, firewall.SECONDS)

    def test_volumes(self) -> None:
        removed = vmserver.RemoveVolumeRequest(id="v1")
        self.asked(self.client.remove_volume("v1"), "RemoveVolume", removed, 30.0)
        request = vmserver.MeasureVolumesRequest(ids=["v1", "v2"])
        self.channel.answers["MeasureVolumes"] = vmserver.MeasureVolumesResponse(
            volumes=[
                vmserver.VolumeUsage(id="v1", written=vmserver.Written(bytes=5)),
                vmserver.VolumeUsage(id="other", written=vmserver.Written(bytes=6)),
            ]
        )
        call = self.client.measure_volumes(["v1", "v2"])
        self.assertEqual(self.asked(call, "MeasureVolumes", request, volumes.MEASURE_SECONDS), {"v1": 5})

    def test_services(self) -> None:
        key = vmserver.ServiceKey(address=bytes([10, 0, 0, 1]), port=80)
        request = vmserver.ServiceReportRequest(key=key)
        self.asked(self.client.service_report(key, 4.0), "ServiceReport", request, 4.0)


class StreamTests(RequestCase):
    """Calls that stream their requests or answers."""

    def test_whatever_runs_on_has_no_time_limit_and_a_bound_on_what_is_received_ahead(self) -> None:
        for rpc, call in (
            ("Exec", self.client.exec),
            ("Attach", self.client.attach),
            ("PortForward", self.client.port_forward),
            ("Shell", self.client.shell),
        ):
            opened = self.channel.answers[rpc] = FakeCall([])
            self.channel.calls.clear()
            self.assertIs(call(), opened)
            self.assertEqual(self.channel.calls, [(rpc, None, None)])
            self.assertEqual(opened.ahead, limits.STREAM_AHEAD_BYTES)
        self.channel.answers["Watch"] = FakeCall([vmserver.WatchEvent(removed="c1")])
        self.channel.calls.clear()
        events = self.client.watch()
        self.assertEqual(self.channel.calls, [("Watch", vmserver.WatchRequest(), None)])
        (event,) = self.successResultOf(start(collected(events)))
        self.assertEqual(event, vmserver.WatchEvent(removed="c1"))

    def test_an_event_of_what_can_be_no_container_ends_the_stream(self) -> None:
        watched = self.channel.answers["Watch"] = FakeCall([vmserver.WatchEvent(removed="../x")])
        error: Any = self.failureResultOf(start(collected(self.client.watch())), GrpcError).value
        self.assertIs(error.code, Code.INVALID_ARGUMENT)
        self.assertTrue(watched.cancelled)
        watched.cancelled = False
        self.client.watch().cancel()
        self.assertTrue(watched.cancelled)

    def test_a_log(self) -> None:
        record = vmserver.LogRecord(line=b"a", cursor="1")
        for follow in (False, True):
            read = self.channel.answers["ReadLog"] = FakeCall([record], GrpcError(Code.UNAVAILABLE, "lost"))
            request = vmserver.ReadLogRequest(id="c1", cursor="0", follow=follow, text=True)
            self.channel.calls.clear()
            reading = self.client.read_log("c1", "0", follow)
            self.assertEqual(self.successResultOf(start(anext(reading))), record)  # type: ignore[arg-type]
            self.failureResultOf(start(anext(reading)), Unavailable)  # type: ignore[arg-type]
            self.assertEqual(self.channel.calls, [("ReadLog", request, None)])
            self.assertTrue(read.cancelled)

    def test_an_image_and_a_layer_go_in_pieces_of_every_byte(self) -> None:
        data = [b"a" * CHUNK_BYTES + b"b", b"c"]
        pieces = [b"a" * CHUNK_BYTES, b"b", b"c"]
        header = vmserver.LoadImageRequest(header=vmserver.LoadImageHeader(image_id="i"))
        loaded = [header, *(vmserver.LoadImageRequest(data=each) for each in pieces)]
        self.asked(self.client.load_image("i", iterated(*data)), "LoadImage", loaded, client.LOAD_SECONDS)
        layer = vmserver.PutLayerHeader(diff_id="a", size=9)
        put = [vmserver.PutLayerRequest(header=layer), *(vmserver.PutLayerRequest(data=x) for x in pieces)]
        self.asked(self.client.put_layer(layer, iterated(*data)), "PutLayer", put, layers.PUT_SECONDS)

    def test_data_that_can_not_be_closed_need_not_be(self) -> None:
        async def used() -> str:
            async with closing(cast(Any, iter(()))):
                return "used"

        self.assertEqual(self.successResultOf(start(used())), "used")

    def test_a_volume_is_put_with_all_that_it_is_to_be(self) -> None:
        change = Removed(b"old")
        header = vmserver.VolumeHeader(
            id="v1",
            file=True,
            in_memory=True,
            bounds=vmserver.VolumeBounds(entries=3, bytes=1000),
            size_limit=5,
            huge_page_size=6,
        )
        put = [
            vmserver.PutVolumeRequest(header=header),
            vmserver.PutVolumeRequest(change=change_to_wire(change)),
        ]
        call = self.client.put_volume(
            "v1", file=True, in_memory=True, bounds=BOUNDS, changes=iterated(change),
            size_limit=5, huge_page_size=6,
        )  # fmt: skip
        self.asked(call, "PutVolume", put, volumes.VOLUME_SECONDS)

    def files(self, *names: str, size: int = 1) -> list[Entry]:
        return [Entry(name.encode(), FILE, 0o644, 0, 0, size, 1) for name in names]

    def listed(self, *pages: list[Entry]) -> FakeCall:
        messages = [vmserver.ListVolumeResponse(entries=map(to_wire, page)) for page in pages]
        self.channel.answers["ListVolume"] = call = FakeCall([*messages])
        return call

    def test_a_list_may_be_as_large_as_its_bounds_and_no_larger(self) -> None:
        request = vmserver.ListVolumeRequest(id="v1", bounds=vmserver.VolumeBounds(entries=3, bytes=1000))
        four = self.files("a", "b", "c", "d", size=250)  # the top itself does not count
        self.listed(four[:2], four[2:])
        found = self.asked(
            self.client.list_volume("v1", BOUNDS), "ListVolume", request, volumes.VOLUME_SECONDS
        )
        self.assertEqual(found, {each.path: each for each in four})
        for pages in ([*four, *self.files("e", size=0)], self.files("a", size=1001)):
            call = self.listed(pages)
            self.failureResultOf(start(self.client.list_volume("v1", BOUNDS)), ResourceExhausted)
            self.assertTrue(call.cancelled)

    def read(self, *changes: Any, wanted: list[Entry]) -> Any:
        self.channel.answers["ReadVolume"] = FakeCall([change_to_wire(each) for each in changes])
        self.channel.calls.clear()
        return start(collected(self.client.read_volume("v1", wanted)))

    def test_files_are_read_in_the_order_in_which_they_were_asked_for(self) -> None:
        first, second = wanted = self.files("a", "b")
        changes = [first, b"x", second, Unread(b"b")]
        self.assertEqual(self.successResultOf(self.read(*changes, wanted=wanted)), changes)
        request = vmserver.ReadVolumeRequest(id="v1", entries=map(to_wire, wanted))
        self.assertEqual(self.channel.calls, [("ReadVolume", request, volumes.VOLUME_SECONDS)])
        for refused in (
            [second, first],
            [first, first],
            [first, second, *self.files("c")],
            [Unread(b"c")],
            [first, Unread(b"a"), Unread(b"a")],
            [first, b""],
        ):
            self.failureResultOf(self.read(*refused, wanted=wanted), InvalidArgument)

    def test_what_takes_long_to_make_or_to_read_gives_other_work_its_turns(self) -> None:
        clock = Clock()
        self.channel.turns = Turns(clock)
        seconds = clock.seconds

        def later() -> float:
            clock.rightNow += 0.02
            return seconds()

        self.patch(clock, "seconds", later)
        files = self.files(*map(str, range(5000)))
        self.channel.answers["ReadVolume"] = FakeCall([])
        network = ip_network("10.0.0.0/8")
        for call in (
            collected(self.client.read_volume("v1", files)),
            self.client.set_firewall(PodFirewall((Allowed((network,)),) * 3)),
            self.client.set_firewall(PodFirewall(None, (Allowed((network,)),) * 3)),
            self.client.exec_sync("c1", ["ls"], 0, 60.0, 9),
        ):
            clock.rightNow += 1
            self.channel.turns.rest()
            made: Any = start(call)
            self.assertNoResult(made)
            while clock.getDelayedCalls():
                clock.advance(0)
            self.successResultOf(made)

    def test_changes_of_volumes_are_told_as_long_as_somebody_listens(self) -> None:
        request = vmserver.WatchVolumesRequest(
            ids=["v1"], bounds=vmserver.VolumeBounds(entries=3, bytes=1000)
        )
        events = [vmserver.WatchVolumesResponse(id="v1")] * 2
        watched = self.channel.answers["WatchVolumes"] = FakeCall([*events])
        call = collected(self.client.watch_volumes(["v1"], BOUNDS))
        self.assertEqual(self.asked(call, "WatchVolumes", request, None), ["v1", "v1"])
        self.assertTrue(watched.cancelled)

    def test_rules_of_services_are_sent_while_their_states_are_read(self) -> None:
        states = [vmserver.ServiceRulesState(number=1), vmserver.ServiceRulesState(number=2)]
        rules = self.channel.answers["ServiceRules"] = FakeCall([*states])
        update = vmserver.ServiceRulesUpdate(number=2)
        call = collected(self.client.service_rules(iterated(update)))
        self.assertEqual(self.asked(call, "ServiceRules", None, None), states)
        self.assertEqual((rules.sent, rules.cancelled), ([update], True))

    def test_rules_that_can_not_be_sent_end_their_call(self) -> None:
        async def broken() -> AsyncIterator[Any]:
            raise Unavailable("the view of the cluster is lost")
            yield

        rules = self.channel.answers["ServiceRules"] = FakeCall([vmserver.ServiceRulesState()])
        states = self.client.service_rules(broken())
        self.successResultOf(start(anext(states)))  # type: ignore[arg-type]
        self.assertTrue(rules.cancelled)

    def test_nobody_sends_rules_any_more_once_their_states_are_no_longer_read(self) -> None:
        ended: list[bool] = []

        async def updates() -> AsyncIterator[Any]:
            try:
                await Deferred()
                yield
            finally:
                ended.append(True)

        self.channel.answers["ServiceRules"] = FakeCall([vmserver.ServiceRulesState()])
        states = self.client.service_rules(updates())
        self.successResultOf(start(anext(states)))  # type: ignore[arg-type]
        self.successResultOf(start(states.aclose()))  # type: ignore[arg-type]
        self.assertEqual(ended, [True])


class ShellTests(RequestCase):
    """The output of a shell of the VM."""

    def output(self, *messages: vmserver.SessionOutput, error: GrpcError | None = None) -> Any:
        self.call = FakeCall([*messages], error)
        return start(collected(self.client.shell_output(cast(Any, self.call))))

    def end(self, code: int) -> vmserver.SessionOutput:
        return vmserver.SessionOutput(end=vmserver.SessionEnd(exit_code=code))

    def test_it_ends_with_an_exit_code_of_a_byte(self) -> None:
        said = vmserver.SessionOutput(stdout=b"x")
        for code, told in ((0, 0), (255, 255), (256, 255), (-1, 255)):
            ended = self.output(said, self.end(code), said)
            self.assertEqual(self.successResultOf(ended), [said, self.end(told)])
            self.assertTrue(self.call.cancelled)

    def test_without_one_it_has_failed(self) -> None:
        self.failureResultOf(self.output(), InfranetesError)

    def test_an_agent_may_have_no_shell(self) -> None:
        old = self.output(error=GrpcError(Code.UNIMPLEMENTED, "unknown method"))
        self.failureResultOf(old, NotOffered)
        self.failureResultOf(self.output(error=GrpcError(Code.UNAVAILABLE, "lost")), Unavailable)
