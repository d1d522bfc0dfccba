# SPDX-License-Identifier: Apache-2.0
"""`IGuestAccess` by SSH, over Twisted's Conch.

`access` is the way into one guest. Each of its `commands` is a `channel` on one of its `connections`, which
is a `transport` with a `connection` on it. What the guest's server sends is hostile: all of these bound it.
"""
