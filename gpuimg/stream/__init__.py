"""The image streamer: CRIU's socket protocol, the shard stream, capture, serve and extract.

Import the modules, not this package: the executable must start in a few milliseconds.
"""
