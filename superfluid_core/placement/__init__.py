"""Placement: one pure choice over what nodes reported and what this head reserved since."""
