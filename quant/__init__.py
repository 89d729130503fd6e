"""What a block's bytes look like: formats, layout, storing and gathering."""
