# SPDX-License-Identifier: Apache-2.0
"""A directory tree, or a single file, that is kept equal on the node and in a VM.

Each side scans its own (`scan`), the node compares both with what they last had in common (`plan`), and each
side writes what it lacks (`apply`); `wire` is the form in which manifests and changes are sent. Everything
here blocks and belongs in a thread.
"""
