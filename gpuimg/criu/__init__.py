"""Finding criu, running it, and reading the facts that its images hold.

May use `gpuimg.stream` through what its callers pass in; knows nothing of how bytes are kept.
"""
