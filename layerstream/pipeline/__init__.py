"""Ways to move one layer's pages between KV cache and host pool (`base.py` has the contract)."""
