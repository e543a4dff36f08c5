"""Kernels and their launchers: each equals the codec, bit for bit where it encodes."""
