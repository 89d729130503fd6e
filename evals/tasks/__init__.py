"""Tasks beyond finding a needle, one file each."""
