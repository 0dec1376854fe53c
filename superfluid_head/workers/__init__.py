"""Several whole heads on one port: the parent that keeps them, and what makes them answer as one."""
