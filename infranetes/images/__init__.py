# SPDX-License-Identifier: Apache-2.0
"""The node's images: pulled once by skopeo, kept as OCI blobs, loaded into the VMs that need them."""

from infranetes.images.auth import Credentials, credentials
from infranetes.images.config import ImagesConfig
from infranetes.images.index import Image
from infranetes.images.store import FsUsage, ImageStore

__all__ = ["Credentials", "FsUsage", "Image", "ImageStore", "ImagesConfig", "credentials"]
