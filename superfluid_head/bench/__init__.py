"""Measures what the product promises, against real processes; `cli.py` is its door (`superfluid bench`)."""
