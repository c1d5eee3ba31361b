"""What callers use: a cache to a blob, a blob to a cache, and what a blob says about itself."""
