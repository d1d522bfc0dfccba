# SPDX-License-Identifier: Apache-2.0
"""What the node daemon says to containerd's own services, as ``proto/containerd.proto`` describes it."""

from infranetes_common.wire.descriptors import namespace

globals().update(namespace("containerd.proto"))
