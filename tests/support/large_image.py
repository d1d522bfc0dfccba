# SPDX-License-Identifier: Apache-2.0
"""An image as large as those of real workloads, the same bytes for the same sizes."""

from __future__ import annotations

import random
from collections.abc import Iterator

from tests.support import oci

MIB = 1024 * 1024
FILE_BYTES = 64 * 1024  # on the average


def large(random_mib: int, plain_mib: int, layers: int) -> oci.BuiltImage:
    """busybox, and over it `layers` equal layers.

    :param random_mib: of all of them together: bytes that do not compress, so that is what is pulled.
    :param plain_mib: of all of them together: bytes that compress to nearly nothing.
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
