"""The daemon of one GPU: a model, a scheduler, an engine, behind the fleet link."""
