"""Request models of the HTTP side."""
