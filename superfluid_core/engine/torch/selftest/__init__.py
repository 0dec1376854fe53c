"""What an installation must show before it is trusted: every kernel against plain torch, whole engines against each other.

The same checks run on a GPU box by one command and, in Triton's interpreter, in the tests of a machine without a GPU.
"""
