# SPDX-License-Identifier: Apache-2.0
"""The CSI's messages, enums and services, as ``proto/csi.proto`` describes them."""

from infranetes_common.wire.descriptors import namespace

globals().update(namespace("csi.proto"))
