"""Constraints on a model's output: grammars compiled against a vocabulary, and the masks of the lanes that have one."""
