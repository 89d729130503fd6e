"""Groups of ranks and how partial attention meets over them."""
