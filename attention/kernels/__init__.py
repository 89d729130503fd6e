"""Compiled attention kernels."""
