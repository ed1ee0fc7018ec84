"""The LMCache tier: objects in the memory of an `lmcache server` on this machine."""
