# SPDX-License-Identifier: Apache-2.0
"""One call of the CRI by grpcio, in a process of its own: never imported by the tests.

python -m tests.interop.grpcio_kubelet SOCKET NAME=VALUE...   calls Version with this metadata
"""

from __future__ import annotations

import sys

import grpc

from infranetes_common.wire import cri


def main(path: str, *pairs: str) -> None:
    """Call, and print what answered."""
    with grpc.insecure_channel(f"unix:{path}") as channel:
        version = channel.unary_unary(
            "/runtime.v1.RuntimeService/Version",
            request_serializer=cri.VersionRequest.SerializeToString,
            response_deserializer=cri.VersionResponse.FromString,
        )
        metadata = [tuple(pair.split("=", 1)) for pair in pairs]
        print(version(cri.VersionRequest(), timeout=30.0, metadata=metadata).runtime_name)


main(*sys.argv[1:])
