# SPDX-License-Identifier: Apache-2.0
"""Layers' tars made into read-only erofs images, which overlayfs takes as lower directories.

Layers are hostile, so a child process without rights reads them::

    build     the node's side: starts the child, names and syncs what it wrote
    __main__  the child: gives up its rights, then works
    sandbox   what the child can't do
    convert   one tar into one image
    source    the tar's bytes, uncompressed and summed
    tar       the tar's entries
    sparse    files with holes in a tar
    tree      what the entries make, by the rules for OCI layers
    writer    the image, data first
    format    erofs's structures
    limits    how much of everything a layer may have

The child starts often and imports none of Twisted: this module, and all but `build`, stay without it.
"""
