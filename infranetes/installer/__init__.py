# SPDX-License-Identifier: Apache-2.0
"""Puts the daemon beside a node's own container runtime, from a tree in an image, and takes it away again.

A program of its own without a reactor, which may wait: a privileged pod runs it, with the node's files at
`--root`. `steps` has the states and what leads from one to the next; the rest is what it acts with.
"""
