"""KV accounts: block ids in ints, no tensors."""
