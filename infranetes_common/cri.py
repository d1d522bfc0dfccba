"""The CRI's messages, enums and services, as ``proto/cri.proto`` describes them."""

from infranetes_common.descriptors import namespace

globals().update(namespace("cri.proto"))
