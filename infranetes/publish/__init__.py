# SPDX-License-Identifier: Apache-2.0
"""`infranetes-guest publish` and `infranetes-guest images`: a disk becomes an image of a cloud.

A person's commands: libraries that block are called directly. What all clouds share is in `interface`,
`plan`, `journal` and `progress`; each cloud has modules of its own.
"""
