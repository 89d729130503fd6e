"""Speed and memory, always beside the machine's limit: `longctx bench`."""
