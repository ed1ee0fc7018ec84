"""The disk tier: one file for each object and rank in a folder."""
