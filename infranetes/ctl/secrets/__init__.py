# SPDX-License-Identifier: Apache-2.0
"""Finds the secrets of a node, so that nothing that infranetes-ctl shows or packs has one."""
