"""Data sets of images: IDX and CIFAR files, and folders of images."""
