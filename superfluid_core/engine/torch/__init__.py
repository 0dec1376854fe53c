"""The torch engine: one code path for cpu and cuda."""
