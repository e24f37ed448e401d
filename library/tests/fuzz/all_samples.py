"""The samples of all houses that are installed: the library's, and those that the laboratory's tests bring."""

from importlib.util import find_spec

from . import samples

SAMPLES = dict(samples.SAMPLES)
if find_spec("blockcache_lab") is not None:
    import laboratory_samples

    SAMPLES |= laboratory_samples.SAMPLES
