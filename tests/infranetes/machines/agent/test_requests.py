# SPDX-License-Identifier: Apache-2.0
"""What each call asks the agent, how long it waits, and what it makes of the answer."""

from __future__ import annotations

from ipaddress import ip_network
from typing import Any, cast

from infranetes.machines import interface
from infranetes.machines.agent import client, disks, firewall, keeping, layers, nfs, size, volumes
from infranetes.machines.keeping import Adoption, Hook
from infranetes.providers.interface import MemoryRange
from infranetes_common.concurrency import start
from infranetes_common.errors import InfranetesError, InvalidArgument, Unavailable
from infranetes_common.nfs import NfsMount
from infranetes_common.pod_firewall import Allowed, PodFirewall, Ports
from infranetes_common.wire import cri, vmserver
from tests.infranetes.machines.agent.request_case import METHODS, RequestCase


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
        attested = vmserver.AttestRequest(nonce=b"n" * 32)
        self.asked(one.attest(b"n" * 32), "Attest", attested, 60.0)
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
