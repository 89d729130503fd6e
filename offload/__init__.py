"""Keyed stores of opaque bytes: the block key and the store protocol."""
