# SPDX-License-Identifier: Apache-2.0
"""Attacks of a hostile agent on the daemon.

Each takes the HostileAgent and the request, and answers in place of the honest method; those on methods that
stream are async generators. The function `METHOD_NAME` is the attack NAME on METHOD.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from functools import partial
from typing import NoReturn

from google.protobuf.message import Message
from twisted.internet.defer import Deferred

from infranetes_common.wire import cri, vmserver
from tests.support.hostile.agent import Attack, HostileAgent
from txgrpc.service import Method

MIB = 1024 * 1024
NAN = float("nan")
KIND = vmserver.VolumeEntry
FILE, DIRECTORY, SYMLINK = KIND.FILE, KIND.DIRECTORY, KIND.SYMLINK
# Made once here, because making them may take longer than a test may block its reactor: on a machine whose
# memory is new, each page that is touched first costs its hypervisor something.
#: Nearly 16 MiB of a file.
PIECE = vmserver.VolumeChange(data=bytes(16 * MIB - 64)).SerializeToString()
#: An unknown field of 15 MiB.
HUGE = b"\xfa\x7f\x80\x80\xc0\x07" + bytes(15 * MIB)

ATTACKS: dict[tuple[str, str], Attack] = {}


# ---- any call


async def _never(agent: HostileAgent, request: Message) -> NoReturn:
    await Deferred()
    raise AssertionError("never")


async def _never_stream(agent: HostileAgent, request: Message) -> AsyncIterator[bytes]:
    await Deferred()
    yield b""


async def _huge(agent: HostileAgent, request: Message) -> bytes:
    return HUGE


async def _huge_stream(agent: HostileAgent, request: Message) -> AsyncIterator[bytes]:
    while True:
        yield await _huge(agent, request)


async def _broken(agent: HostileAgent, request: Message) -> bytes:
    return b"\x0a\xff\xff\xff\xff\x0f\x00"


async def _broken_stream(agent: HostileAgent, request: Message) -> AsyncIterator[bytes]:
    yield await _broken(agent, request)


async def _corpus(agent: HostileAgent, request: Message, *, method: str) -> bytes:
    return next(agent.corpus[method])


async def _corpus_stream(agent: HostileAgent, request: Message, *, method: str) -> AsyncIterator[bytes]:
    while True:
        yield next(agent.corpus[method])


for _method in vmserver.Agent.methods:
    for _name, _one, _many in (
        ("never", _never, _never_stream),
        ("huge", _huge, _huge_stream),
        ("broken", _broken, _broken_stream),
        ("corpus", partial(_corpus, method=_method.name), partial(_corpus_stream, method=_method.name)),
    ):
        streams = Method.from_descriptor(_method).server_streaming
        ATTACKS[_method.name, _name] = _many if streams else _one


# ---- figures


async def Stats_cards(agent: HostileAgent, request: vmserver.StatsRequest) -> vmserver.StatsResponse | bytes:
    """A MiB of empty network cards."""
    return b"\x12\x00" * (MIB // 2 - 8)


async def Stats_containers(
    agent: HostileAgent, request: vmserver.StatsRequest
) -> vmserver.StatsResponse | bytes:
    """A MiB of empty containers."""
    return b"\x1a\x00" * (MIB // 2 - 8)


async def Stats_repeated(
    agent: HostileAgent, request: vmserver.StatsRequest
) -> vmserver.StatsResponse | bytes:
    """A MiB of one field, repeated."""
    return b"\x0a\xf0\xff\x3f" + b"\x08\x01" * (MIB // 2 - 8)


async def Stats_names(agent: HostileAgent, request: vmserver.StatsRequest) -> vmserver.StatsResponse | bytes:
    """Network cards whose names fill the message, and containers that were not asked for."""
    cards = [vmserver.NetworkCard(name=chr(97 + one) * 15000) for one in range(26)]
    containers = [vmserver.ContainerUsage(id=f"{one:032x}") for one in range(200)]
    return vmserver.StatsResponse(machine=vmserver.Usage(time_nanos=1), cards=cards, containers=containers)


async def Stats_negative(
    agent: HostileAgent, request: vmserver.StatsRequest
) -> vmserver.StatsResponse | bytes:
    """The smallest times, the largest counters, and pressures that are not numbers."""
    most = 2**64 - 1
    psi = cri.PsiStats(Full=cri.PsiData(Total=most, Avg10=NAN, Avg60=float("inf"), Avg300=-1.0))
    usage = vmserver.Usage(
        time_nanos=-(2**63),
        cpu=vmserver.Cpu(total_nanos=most),
        memory=vmserver.Memory(usage=most, working_set=most, rss=most),
        cpu_pressure=psi,
        processes=most,
        disks=[vmserver.Disk(device="\x00\n", read_bytes=most)],
    )
    return vmserver.StatsResponse(
        machine=usage,
        cards=[vmserver.NetworkCard(name="", received_bytes=most)],
        containers=[
            vmserver.ContainerUsage(
                id=one, usage=usage, started_at=-1, written=vmserver.Written(time_nanos=-1, bytes=most)
            )
            for one in agent.containers
        ],
    )


async def Stats_text(agent: HostileAgent, request: vmserver.StatsRequest) -> vmserver.StatsResponse | bytes:
    """A name that is not UTF-8."""
    return b"\x12\x04\x0a\x02\xff\xfe"


async def Stats_unknown(
    agent: HostileAgent, request: vmserver.StatsRequest
) -> vmserver.StatsResponse | bytes:
    """Unknown fields, in a message that the daemon passes on."""
    psi = b"\xfa\x7f\x80\x80\x28" + bytes(655360)
    usage = b"\x42" + _varint(len(psi)) + psi
    return b"\x0a" + _varint(len(usage)) + usage


# ---- containers


async def Watch_ids(
    agent: HostileAgent, request: vmserver.WatchRequest
) -> AsyncIterator[vmserver.WatchEvent | bytes]:
    """Endless containers that were never created."""
    async for event in agent._Watch(request):
        yield event
        if event.WhichOneof("event") == "synced":
            break
    for number in itertools.count():
        yield vmserver.WatchEvent(container=agent.state(f"{number:032x}"))


async def Watch_snapshot(
    agent: HostileAgent, request: vmserver.WatchRequest
) -> AsyncIterator[vmserver.WatchEvent | bytes]:
    """An endless snapshot."""
    for number in itertools.count():
        yield vmserver.WatchEvent(container=agent.state(f"{number:032x}", message="x" * 1000))


async def Watch_same(
    agent: HostileAgent, request: vmserver.WatchRequest
) -> AsyncIterator[vmserver.WatchEvent | bytes]:
    """The end of one container, endlessly."""
    async for event in agent._Watch(request):
        yield event
        if event.WhichOneof("event") == "synced":
            break
    state = agent.state(agent.containers[0], cri.CONTAINER_EXITED, message="x" * 4000, finished_at=3)
    ended = vmserver.WatchEvent(container=state).SerializeToString()
    while True:
        yield ended


async def Watch_removed(
    agent: HostileAgent, request: vmserver.WatchRequest
) -> AsyncIterator[vmserver.WatchEvent | bytes]:
    """The removal of one container, endlessly."""
    async for event in agent._Watch(request):
        yield event
        if event.WhichOneof("event") == "synced":
            break
    removed = vmserver.WatchEvent(removed=agent.containers[0]).SerializeToString()
    while True:
        yield removed


async def _ended(
    agent: HostileAgent, request: vmserver.WatchRequest, **fields: object
) -> AsyncIterator[vmserver.WatchEvent]:
    async for event in agent._Watch(request):
        yield event
        if event.WhichOneof("event") == "synced":
            break
    for one in agent.containers:
        yield vmserver.WatchEvent(container=agent.state(one, cri.CONTAINER_EXITED, **fields))
    await Deferred()


async def Watch_message(
    agent: HostileAgent, request: vmserver.WatchRequest
) -> AsyncIterator[vmserver.WatchEvent | bytes]:
    """A termination message of 8 MiB."""
    async for event in _ended(agent, request, message="x" * 8 * MIB, finished_at=3):
        yield event


async def Watch_words(
    agent: HostileAgent, request: vmserver.WatchRequest
) -> AsyncIterator[vmserver.WatchEvent | bytes]:
    """A termination message of the largest size, and all other fields out of range."""
    user = cri.ContainerUser(linux=cri.LinuxContainerUser(uid=-1, gid=-1, supplemental_groups=range(-1, 250)))
    resources = cri.LinuxContainerResources(
        cpu_period=-1, cpuset_cpus="0," * 10_000, unified={"k" * 5000: "v" * 5000}
    )
    words = {"message": "x" * 100_000, "reason": "y" * 50_000, "finished_at": -1, "exit_code": -(2**31)}
    async for event in _ended(agent, request, user=user, resources=resources, **words):
        yield event


# ---- logs


async def ReadLog_newlines(
    agent: HostileAgent, request: vmserver.ReadLogRequest
) -> AsyncIterator[vmserver.LogRecord | bytes]:
    """Records of 2 MiB of newlines."""
    for number in itertools.count():
        yield vmserver.LogRecord(time_nanos=number, line=b"\n" * 2 * MIB, cursor=str(number))


async def ReadLog_lines(
    agent: HostileAgent, request: vmserver.ReadLogRequest
) -> AsyncIterator[vmserver.LogRecord | bytes]:
    """Records of the largest size, all newlines, with a gap before each."""
    for number in itertools.count():
        yield vmserver.LogRecord(time_nanos=-number, line=b"\n" * 16384, cursor=str(number), gap=True)


async def ReadLog_cursors(
    agent: HostileAgent, request: vmserver.ReadLogRequest
) -> AsyncIterator[vmserver.LogRecord | bytes]:
    """Cursors of 60,000 characters."""
    for number in itertools.count():
        yield vmserver.LogRecord(time_nanos=1, line=b"x", cursor=f"{number}" + "c" * 60_000)


async def ReadLog_text(
    agent: HostileAgent, request: vmserver.ReadLogRequest
) -> AsyncIterator[vmserver.LogRecord | bytes]:
    """Text of the largest size: newlines, lines that are none, the shortest lines, one endless line."""
    line = b"2026-11-28T07:40:00.000000000Z stdout F \n"
    texts = [b"\n" * 60_000, b"T stdout F x\n" * 4_000, line * (60_000 // len(line)), line[:-1] * 1_400]
    for number, text in enumerate(itertools.cycle(texts)):
        yield vmserver.LogRecord(text=text, cursor=str(number), gap=True)


async def ReadLog_empty(
    agent: HostileAgent, request: vmserver.ReadLogRequest
) -> AsyncIterator[vmserver.LogRecord | bytes]:
    """Empty records, endlessly."""
    while True:
        yield b""


# ---- shells


async def Shell_output(agent: HostileAgent, request: object) -> AsyncIterator[vmserver.SessionOutput | bytes]:
    """Output of the largest size, endlessly."""
    output = vmserver.SessionOutput(stdout=b"\x1b]0;" + bytes(256 * 1024 - 4)).SerializeToString()
    while True:
        yield output


async def Shell_empty(agent: HostileAgent, request: object) -> AsyncIterator[vmserver.SessionOutput | bytes]:
    """Empty output, endlessly."""
    while True:
        yield b""


# ---- volumes


async def ListVolume_repeated(
    agent: HostileAgent, request: vmserver.ListVolumeRequest
) -> AsyncIterator[vmserver.ListVolumeResponse | bytes]:
    """One path, endlessly."""
    entry = vmserver.VolumeEntry(path=b"a", mode=0o644)
    page = vmserver.ListVolumeResponse(entries=[entry] * 256).SerializeToString()
    while True:
        yield page


async def ListVolume_empty(
    agent: HostileAgent, request: vmserver.ListVolumeRequest
) -> AsyncIterator[vmserver.ListVolumeResponse | bytes]:
    """Empty pages, endlessly."""
    while True:
        yield b""


async def ListVolume_long(
    agent: HostileAgent, request: vmserver.ListVolumeRequest
) -> AsyncIterator[vmserver.ListVolumeResponse | bytes]:
    """The largest number of paths, each of the largest length."""
    for number in range(16_000):
        path = b"/".join([b"%08d" % number, *[b"d" * 250] * 15])
        entry = vmserver.VolumeEntry(path=path, kind=SYMLINK, target=b"t" * 4000, mode=0o777)
        yield vmserver.ListVolumeResponse(entries=[entry] * 1)


async def ListVolume_many(
    agent: HostileAgent, request: vmserver.ListVolumeRequest
) -> AsyncIterator[vmserver.ListVolumeResponse | bytes]:
    """The largest number of files, each in a deep directory."""
    yield vmserver.ListVolumeResponse(entries=[vmserver.VolumeEntry(path=b"", kind=DIRECTORY, mode=0o755)])
    for page in range(62):
        entries = [
            vmserver.VolumeEntry(path=b"d/" * 100 + b"%d-%d" % (page, number), kind=FILE, mode=0o644)
            for number in range(256)
        ]
        yield vmserver.ListVolumeResponse(entries=entries)


async def ListVolume_file(
    agent: HostileAgent, request: vmserver.ListVolumeRequest
) -> AsyncIterator[vmserver.ListVolumeResponse | bytes]:
    """One file of the largest size, which attacks on ReadVolume then read."""
    top = vmserver.VolumeEntry(path=b"", kind=DIRECTORY, mode=0o755)
    file = vmserver.VolumeEntry(path=b"f", kind=FILE, mode=0o644, size=200 * MIB, mtime_nanos=2**62)
    yield vmserver.ListVolumeResponse(entries=[top, file])


async def ReadVolume_pieces(
    agent: HostileAgent, request: vmserver.ReadVolumeRequest
) -> AsyncIterator[vmserver.VolumeChange | bytes]:
    """Endless data, in messages of nearly 16 MiB."""
    yield vmserver.VolumeChange(entry=request.entries[0])
    while True:
        yield PIECE


async def ReadVolume_empty(
    agent: HostileAgent, request: vmserver.ReadVolumeRequest
) -> AsyncIterator[vmserver.VolumeChange | bytes]:
    """A file's empty data, endlessly."""
    yield vmserver.VolumeChange(entry=request.entries[0])
    piece = vmserver.VolumeChange(data=b"").SerializeToString()
    while True:
        yield piece


async def WatchVolumes_again(
    agent: HostileAgent, request: vmserver.WatchVolumesRequest
) -> AsyncIterator[vmserver.WatchVolumesResponse | bytes]:
    """Reports, endlessly, that every volume has changed."""
    while True:
        for id in request.ids:
            yield vmserver.WatchVolumesResponse(id=id)


# ---- commands

# Made once here, because allocating 15 MiB may take longer than a test may block its reactor.
_MUCH_OUTPUT = vmserver.ExecSyncResponse(stdout=bytes(15 * MIB)).SerializeToString()


async def ExecSync_output(
    agent: HostileAgent, request: vmserver.ExecSyncRequest
) -> vmserver.ExecSyncResponse | bytes:
    """More output than was asked for."""
    return _MUCH_OUTPUT


async def ListImages_many(
    agent: HostileAgent, request: vmserver.ListImagesRequest
) -> vmserver.ListImagesResponse | bytes:
    """A MiB of images without names."""
    return b"\x0a\x00" * (MIB // 2 - 8)


async def ListLayers_many(
    agent: HostileAgent, request: vmserver.ListLayersRequest
) -> vmserver.ListLayersResponse | bytes:
    """Over a hundred KiB of layers without names."""
    return b"\x0a\x00" * 60_000


async def ListLayers_others(
    agent: HostileAgent, request: vmserver.ListLayersRequest
) -> vmserver.ListLayersResponse | bytes:
    """Layers that were not asked for, and all those that were, in another order."""
    return vmserver.ListLayersResponse(
        layers=[
            vmserver.LayerState(diff_id=diff_id, mounted=True)
            for diff_id in [*reversed(request.diff_ids), f"sha256:{0:064x}"]
        ]
    )


async def ListLayers_digests(
    agent: HostileAgent, request: vmserver.ListLayersRequest
) -> vmserver.ListLayersResponse | bytes:
    """Layers whose digests are paths, with the largest numbers of bytes arrived."""
    return vmserver.ListLayersResponse(
        layers=[
            vmserver.LayerState(diff_id=diff_id, arrived=2**64 - 1, digest="../" * 30)
            for diff_id in request.diff_ids
        ]
    )


def _varint(number: int) -> bytes:
    out = b""
    while number > 127:
        out += bytes([number & 127 | 128])
        number >>= 7
    return out + bytes([number])


for _function, _answer in list(globals().items()):
    _start, _, _end = _function.partition("_")
    if _end and _start in vmserver.Agent.methods_by_name:
        ATTACKS[_start, _end] = _answer
