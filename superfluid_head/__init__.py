"""The stateless head: HTTP in, sessions placed on nodes, text out."""
