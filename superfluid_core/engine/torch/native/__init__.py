"""Compiled parts of the CPU step: C++ sources, how they are built, and how they are called."""
