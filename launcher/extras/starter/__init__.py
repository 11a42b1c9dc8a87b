"""``init``: copies the files of a small project, which are in ``project``, into a new folder."""
