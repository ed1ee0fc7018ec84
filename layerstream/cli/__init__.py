"""The `layerstream` command."""
