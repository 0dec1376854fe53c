"""How families of models write tool calls and reasoning: readers of both, and the shapes that enforce them."""
