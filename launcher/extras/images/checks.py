"""The checks of image files that the core uses; each stands beside the reader of its files."""

from __future__ import annotations

from launcher.extras.images.cifar_files import check_cifar10
from launcher.extras.images.folder_files import check_images, class_folders
from launcher.extras.images.idx_files import check_idx

__all__ = ["check_cifar10", "check_idx", "check_images", "class_folders"]
