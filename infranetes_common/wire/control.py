# SPDX-License-Identifier: Apache-2.0
"""What infranetes-ctl and the node daemon say to each other, as ``proto/control.proto`` describes it."""

from infranetes_common.wire.descriptors import namespace

globals().update(namespace("control.proto"))
