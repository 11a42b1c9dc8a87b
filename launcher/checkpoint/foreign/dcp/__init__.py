"""Folders of torch's distributed checkpoint (DCP), read without torch and without running what is pickled in them."""

from launcher.checkpoint.foreign.dcp.folder import DcpFolder, read_dcp

__all__ = ["DcpFolder", "read_dcp"]
