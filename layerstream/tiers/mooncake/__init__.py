"""The Mooncake Store tier: objects in memory that machines of a cluster share."""
