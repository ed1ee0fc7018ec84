"""Streams, events and memory of one device behind one small interface (`base.py` has the contract)."""
