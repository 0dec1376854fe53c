"""llama.cpp as an engine: its library computes, the scheduler's plans decide."""
