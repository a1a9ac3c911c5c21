"""Encodings that take the place of RoPE, one file each."""
