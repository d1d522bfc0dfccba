# SPDX-License-Identifier: Apache-2.0
"""The features that join in pods' lives by hooks (`pods.node.hooks`). Volumes are features too; they are in
`infranetes.volumes`."""
