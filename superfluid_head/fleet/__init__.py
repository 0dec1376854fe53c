"""The head side of the fleet: nodes, journals, moves."""
