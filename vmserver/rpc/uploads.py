# SPDX-License-Identifier: Apache-2.0
"""Upload streams: a header, then data."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator

from infranetes_common.errors import InvalidArgument
from infranetes_common.wire import vmserver as messages

MAX_CHUNK_BYTES = 1024 * 1024


async def data_of(
    requests: AsyncIterator[messages.LoadImageRequest] | AsyncIterator[messages.PutLayerRequest], call: str
) -> AsyncGenerator[bytes, None]:
    """Yield the data after the header. :param call: its name, for errors. :raise InvalidArgument: no data."""
    async for request in requests:
        if request.WhichOneof("part") != "data":
            raise InvalidArgument(f"{call}: after the header, data is expected")
        if len(request.data) > MAX_CHUNK_BYTES:
            raise InvalidArgument(f"{call}: data of more than {MAX_CHUNK_BYTES} bytes")
        if request.data:
            yield request.data
