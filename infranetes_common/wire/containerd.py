# SPDX-License-Identifier: Apache-2.0
"""The messages between the node daemon and containerd's own services, from ``proto/containerd.proto``."""

from infranetes_common.wire.descriptors import namespace

globals().update(namespace("containerd.proto"))
