"""gRPC for Twisted: Deferreds in and out, h2 underneath."""

from txgrpc.status import Code, GrpcError

__all__ = ["Code", "GrpcError"]
