"""Files of data as they lie on a disk, read and checked without torch."""
