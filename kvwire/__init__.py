"""kvwire ships the KV caches of language models like media."""
