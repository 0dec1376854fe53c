"""Attention over the paged pool: one protocol, several backends chosen by name."""
