"""The node's images: fetched once by skopeo, kept as an OCI blob store, streamed to the VMs."""

from infranetes.images.auth import Credentials, credentials
from infranetes.images.config import ImagesConfig
from infranetes.images.index import Image
from infranetes.images.store import FsUsage, ImageStore

__all__ = ["Credentials", "FsUsage", "Image", "ImageStore", "ImagesConfig", "credentials"]
