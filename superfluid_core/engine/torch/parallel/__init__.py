"""One model over several devices of a host: each rank holds a share of every layer and runs every plan."""
