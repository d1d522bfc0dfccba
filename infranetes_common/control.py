"""What infranetes-ctl and the node daemon say to each other, as ``proto/control.proto`` describes it."""

from infranetes_common.descriptors import namespace

globals().update(namespace("control.proto"))
