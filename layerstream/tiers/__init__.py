"""Where chunks live beneath the host pool: one contract, and the tiers that come with layerstream."""
