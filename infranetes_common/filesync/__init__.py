# SPDX-License-Identifier: Apache-2.0
"""Synchronization of a directory tree, or a single file, between the node and a VM.

Each side scans its own copy (`scan`), the node compares both with the state they last had in common (`plan`),
and each side writes what it lacks (`apply`); `wire` encodes manifests and changes for sending. Everything
here blocks, so call it in a thread.
"""
