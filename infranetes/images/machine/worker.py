# SPDX-License-Identifier: Apache-2.0
"""The program that handles what strangers made, with no right but to use its descriptors and compute.

    python -m infranetes.images.machine.worker ORDER          take a disk out of an image, or look at one
    python -m infranetes.images.machine.worker ORDER PROGRAM… become a program that looks at one, or copies it
                                                              (qemu-img)

An order is JSON. `take` and `look` answer with JSON (`Answer`) on standard output; other ends are exit codes,
with words on standard error.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import sys
from collections.abc import Sequence

import attrs

from infranetes.images.erofs import sandbox
from infranetes.images.erofs.limits import BAD, FAILED, FULL, MIB, BadLayer
from infranetes.images.machine import boots, unpack
from infranetes.images.machine.disk import DiskFormat
from infranetes.images.machine.formats import HEAD_BYTES, compression_of, format_of, format_said
from infranetes.images.machine.limits import BadDisk, DiskLimits
from infranetes.images.machine.orders import Answer, Order
from infranetes.images.machine.qcow2 import Qcow2
from infranetes.images.machine.reading import RawFile, Readable
from infranetes.images.machine.unpack import TarLayer, Unpacked

_THREADS = 4
_PROGRAM_THREADS = 32
_PROGRAM_FILES = 64  # descriptors
_SECTOR = 512


def work(order: Order) -> Answer:
    """Take a disk, or look at one. :raise BadDisk: it can't be used. :raise OSError: files fail."""
    unpacked = Unpacked("", "")
    disk = order.target
    if order.layers:
        unpacked = unpack.from_layers([TarLayer(*each) for each in order.layers], disk, order.limits)
    elif order.keep and not compression_of(os.pread(order.file, HEAD_BYTES, 0)):
        disk = order.file
    else:
        unpacked = unpack.from_file(order.file, disk, order.limits)
    said = DiskFormat(order.format) if order.format else format_said(unpacked.name)
    kind, content = opened(disk, said, order.limits)
    its = boots.require(boots.look(content, kind), order.architecture)
    size = -(-content.size // _SECTOR) * _SECTOR
    written = disk == order.target
    return Answer(
        written, unpacked.digest, unpacked.name, kind.value, size, its.bios, its.uefi, its.architectures
    )


def opened(disk: int, declared: DiskFormat | None, limits: DiskLimits) -> tuple[DiskFormat, Readable]:
    """Return a disk's format and its content. :raise BadDisk: it can't be used."""
    file = RawFile(disk)
    kind = format_of(file.read(0, HEAD_BYTES), declared)
    content = Qcow2(file) if kind is DiskFormat.QCOW2 else file
    if content.size > limits.virtual_bytes:
        raise BadDisk(
            f"it has {content.size} bytes for its VM, above {limits.virtual_bytes} (images.max_disk_bytes)"
        )
    if content.size < _SECTOR:
        raise BadDisk(f"it has {content.size} bytes, less than a sector: the file is empty or truncated")
    return kind, content


def _bounds(limits: DiskLimits, threads: int, files: int, file_bytes: int) -> dict[int, int]:
    return {
        resource.RLIMIT_NOFILE: files,
        resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_AS: limits.memory_bytes,
        resource.RLIMIT_CPU: threads * int(limits.seconds) + 1,
        resource.RLIMIT_NPROC: threads,
    }


def _parsed(text: str) -> Order:
    fields = json.loads(text)
    layers = tuple((descriptor, compression) for descriptor, compression in fields.pop("layers"))
    return Order(limits=DiskLimits(**fields.pop("limits")), layers=layers, **fields)


def _done(order: Order) -> tuple[int, str]:
    """Work; return an exit code, and the answer or why it failed."""
    try:
        return 0, json.dumps(attrs.asdict(work(order)))
    except (BadDisk, BadLayer) as error:
        return BAD, str(error)
    except MemoryError:
        return BAD, f"to look at it takes more than {order.limits.memory_bytes} bytes of memory"
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        return (FULL if full else FAILED), os.strerror(error.errno or 0)


def main(arguments: Sequence[str]) -> int:
    """Do what `arguments` order."""
    order, program = _parsed(arguments[0]), arguments[1:]
    if program:
        descriptors = [order.target] if order.target >= 0 else []
        written = order.limits.virtual_bytes if descriptors else 0
        bounds = _bounds(order.limits, _PROGRAM_THREADS, _PROGRAM_FILES, written)
        sandbox.enter_for_program(bounds, order.parent, descriptors)
        os.execv(program[0], [*program])  # noqa: S606
    written = order.limits.virtual_bytes + MIB
    sandbox.enter_placed(_bounds(order.limits, _THREADS, 3, written), order.parent)
    code, words = _done(order)
    os.write(2 if code else 1, words.encode(errors="replace"))
    return code


if __name__ == "__main__":
    code = FAILED
    try:
        code = main(sys.argv[1:])
    finally:
        os._exit(code)  # at once, though its threads may still be reading
