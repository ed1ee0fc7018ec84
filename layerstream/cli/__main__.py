"""`python -m layerstream.cli`, where the `layerstream` script is not installed."""

from layerstream.cli.app import main

if __name__ == "__main__":
    main()
