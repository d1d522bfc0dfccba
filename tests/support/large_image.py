# SPDX-License-Identifier: Apache-2.0
"""An image as large as those of real workloads. Equal sizes give equal bytes."""

from __future__ import annotations

import random
from collections.abc import Iterator

from tests.support import oci

MIB = 1024 * 1024
FILE_BYTES = 64 * 1024  # on average


def large(random_mib: int, plain_mib: int, layers: int) -> oci.BuiltImage:
    """Return an image of busybox and `layers` layers of equal size over it.

    :param random_mib: MiB in these layers together that do not compress, which is about what is pulled.
    :param plain_mib: MiB in these layers together that compress to nearly nothing.
    """
    chance = random.Random(f"{random_mib} {plain_mib} {layers}")  # noqa: S311
    made = [oci.busybox_layer()]
    for number in range(layers):
        files = dict(_files(chance, number, random_mib * MIB // layers, plain_mib * MIB // layers))
        made.append(oci.layer(files))
    return oci.image(made, {"Cmd": ["sh"], "Env": ["PATH=/bin"]})


def _files(
    chance: random.Random, number: int, random_bytes: int, plain_bytes: int
) -> Iterator[tuple[str, bytes | tuple[str, str]]]:
    yield "data", ("dir", "755")
    directory = f"data/{number}"
    yield directory, ("dir", "755")
    count = max(1, (random_bytes + plain_bytes) // FILE_BYTES)
    for each in range(count):
        content = chance.randbytes(random_bytes // count) + bytes(plain_bytes // count)
        yield f"{directory}/{each}", content
