"""Syncs into real engines on a GPU, held against what the device can do: `python -m wsync.bench --suite gpu`.

Every case runs in a process of its own. What it needs beside wsync is in docs/bench.md.
"""
