"""The agent's messages and service, as ``proto/vmserver.proto`` describes them."""

from infranetes_common.descriptors import namespace

globals().update(namespace("vmserver.proto"))
