"""Kernels of our own in Triton: attention over the paged pool, and the small passes between products.

Each file keeps its kernels beside the function that launches them; each function has the shape of what plain torch would do, and
is held against it in interpreter mode. Importing any of them needs the triton package; nothing else does.
"""
