"""The chunk store. Knows bytes, chunks, packs and checkpoints; nothing of CRIU, GPUs or S3."""
