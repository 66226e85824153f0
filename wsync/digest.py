"""A 64-bit digest of a tensor that knows where each word belongs."""
