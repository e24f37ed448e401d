"""A disk that has no room left."""

import errno
import os


def full_disk(*args, **kwargs):
    """In place of what writes."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
