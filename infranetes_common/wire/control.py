# SPDX-License-Identifier: Apache-2.0
"""The messages between infranetes-ctl and the node daemon, from ``proto/control.proto``."""

from infranetes_common.wire.descriptors import namespace

globals().update(namespace("control.proto"))
