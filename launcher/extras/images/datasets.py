"""Opens data sets of images; checks of their files are in ``checks``, which needs no torch."""

from launcher.extras.images.cifar import open_cifar10
from launcher.extras.images.folder import open_images
from launcher.extras.images.idx import open_idx

__all__ = ["open_cifar10", "open_idx", "open_images"]
