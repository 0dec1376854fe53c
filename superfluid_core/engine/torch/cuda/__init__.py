"""What a CUDA device adds to a step: recorded decode steps, ids that stay on it, copies beside the work, its memory.

Nothing here calls CUDA but through a small stand-in (`devices.py`), so the logic is the same, and tested, on a CPU.
"""
